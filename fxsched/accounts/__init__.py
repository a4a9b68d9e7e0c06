"""What a step costs, counted on its ops: bytes that workers hold.

Imports: clock, ir, jobs, passes.step.
"""
