"""The shapes by name (M5). [pure]"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from encoders.anthropic_shape import AnthropicShape
from encoders.gemini_shape import GeminiShape
from encoders.openai_shape import OpenAIShape

if TYPE_CHECKING:
    from collections.abc import Mapping

    from encoders.shape import Shape

OPENAI: Final = OpenAIShape()
SHAPES: Final[Mapping[str, Shape]] = MappingProxyType(
    {"openai": OPENAI, "anthropic": AnthropicShape(), "gemini": GeminiShape()}
)
