"""All rows of the zoo, in groups."""

from __future__ import annotations

from .case import Case, Zoo
from .cases_audio import AUDIO
from .cases_autograd import AUTOGRAD
from .cases_control import CONTROL
from .cases_decoders import DECODERS
from .cases_encoders import ENCODERS
from .cases_interfaces import INTERFACES
from .cases_modules import MODULES
from .cases_multimodal import MULTIMODAL
from .cases_numbers import NUMBERS
from .cases_others import DIFFUSERS, TIMM, TORCHVISION
from .cases_parameters import PARAMETERS
from .cases_seq2seq import SEQ2SEQ
from .cases_vision import VISION

GROUPS: tuple[Zoo, ...] = (
    MODULES,
    PARAMETERS,
    INTERFACES,
    AUTOGRAD,
    NUMBERS,
    CONTROL,
    DECODERS,
    ENCODERS,
    SEQ2SEQ,
    VISION,
    AUDIO,
    MULTIMODAL,
    TIMM,
    TORCHVISION,
    DIFFUSERS,
)

# A few of each kind, for the tests.
FAST = (
    "mlp",
    "multihead_attention",
    "tied",
    "several_encoders",
    "lstm",
    "llama",
    "bert",
    "vit",
    "autocast",
)


def all_cases() -> dict[str, Case]:
    """Every row by its name."""
    found: dict[str, Case] = {}
    for zoo in GROUPS:
        for case in zoo:
            assert case.name not in found, f"two rows are called {case.name}"
            found[case.name] = case
    return found
