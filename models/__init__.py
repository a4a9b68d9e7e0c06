"""Small plain models to train, each one file, with no parallel code in any of them.

Imports: nothing.
"""
