"""python -m fxsched"""

from .cli.main import main

main()
