"""python -m fxsched"""

from .cli import main

main()
