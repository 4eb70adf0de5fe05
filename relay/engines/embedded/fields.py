"""Fields of the document that are compiled: items of a batch, JSON Schemas."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic_core import PydanticCustomError, core_schema

from relay.engines.embedded import limits
from relay.engines.embedded.schemas import AnswerSchema, SchemaFault
from relay.engines.embedded.templates import Expression, parse_field

if TYPE_CHECKING:
    from pydantic import GetCoreSchemaHandler

    from relay.engines.embedded.evaluation import Names
    from relay.engines.embedded.templates import Cache


class Items:
    """The items of a batch: a list that is written out, or an expression.

    Attributes:
        written: the list, None if it is an expression. expression: None if it is a list.
    """

    __slots__ = ("expression", "written")

    def __init__(self, value: list[Any] | str, cache: Cache | None = None) -> None:
        self.written = None if isinstance(value, str) else tuple(value)
        self.expression = Expression.parse(value, cache) if isinstance(value, str) else None

    def entries(self, names: Names) -> list[Any]:
        """The items; at most 10,000.

        Raises:
            TemplateProblem: the expression has no value, or one that is no such list.
        """
        if self.expression is not None:
            return self.expression.entries(names)
        return list(self.written or ())

    @classmethod
    def __get_pydantic_core_schema__(
        cls, source: Any, handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        plain = core_schema.union_schema(
            [
                core_schema.list_schema(core_schema.any_schema(), max_length=limits.BATCH_ITEMS),
                core_schema.str_schema(strict=True),
            ]
        )
        return core_schema.with_info_plain_validator_function(
            _items, json_schema_input_schema=plain
        )


def _items(value: Any, info: core_schema.ValidationInfo) -> Items:
    if isinstance(value, list) and len(value) > limits.BATCH_ITEMS:
        raise PydanticCustomError(
            "items_too_long",
            "has {count} items; at most {bound} are allowed",
            {"count": f"{len(value):,}", "bound": f"{limits.BATCH_ITEMS:,}"},
        )
    if not isinstance(value, list | str):
        raise PydanticCustomError("items_type", "must be a list, or an expression for one")
    made: Items = parse_field(Items, value, info)
    return made


class Answer(AnswerSchema):
    """A JSON Schema in a document: of a reply (`json`) or of an answer (`yield.schema`)."""

    __slots__ = ()

    @classmethod
    def __get_pydantic_core_schema__(
        cls, source: Any, handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        plain = core_schema.union_schema(
            [
                core_schema.dict_schema(core_schema.str_schema(), core_schema.any_schema()),
                core_schema.literal_schema([True]),
            ]
        )
        return core_schema.no_info_plain_validator_function(_answer, json_schema_input_schema=plain)


def _answer(value: Any) -> Answer:
    try:
        return Answer(value)
    except SchemaFault as fault:
        raise PydanticCustomError("schema", "{message}", {"message": str(fault)}) from None
