"""All targets, by name."""

from tests.fuzz.files import CONFIGURATION, GGUF, SAFETENSORS
from tests.fuzz.target import Target
from tests.fuzz.templates import TEMPLATES
from tests.fuzz.texts import PROMPTS, STOPS
from tests.fuzz.wire import WIRE

TARGETS: dict[str, Target] = {
    target.name: target
    for target in (PROMPTS, STOPS, TEMPLATES, GGUF, SAFETENSORS, CONFIGURATION, WIRE)
}
