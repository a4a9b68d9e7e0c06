"""A stage to graphs of F, B and W; alone knows AOTAutograd and Inductor.

Imports: ir, jobs.
"""
