"""Passes over a step of all workers: one function a file, `(step, request) -> step`.

Imports: clock, ir, jobs.
"""

from .arrivals import update_on_arrival
from .collect import collect_results
from .lower_sums import lower_sums
from .place_receives import place_receives
from .place_saved import place_saved
from .protect import protect_versions
from .renew import renew_copies
from .route import route_values
from .unroll import unroll_jobs
from .update import update_weights

ORDERED = (  # fill in a step whose jobs have their order
    unroll_jobs,  # one op per job, on its worker
    renew_copies,  # of weights that the loop steps on one worker
    update_on_arrival,  # steps of the optimizer, as gradients come
    update_weights,  # the same, in the planned order
    protect_versions,  # weights that are read when newer ones may be there
    collect_results,  # outputs, gradients, buffers
    lower_sums,  # of gradients: where, and in which order
    place_saved,  # activations that wait for B elsewhere
    route_values,  # messages
    place_receives,  # of messages between hosts: when they are posted
)
