"""The bounds of a workflow document (cnl.md); each is named in its error. [pure]"""

from __future__ import annotations

from typing import Final

DOCUMENT_BYTES: Final = 256 * 1024  # of UTF-8; of an object, as compact JSON
NESTING: Final = 64  # levels of mappings and lists
NODES: Final = 50_000
TASK_DEPTH: Final = 8
TASKS: Final = 500
PROBLEMS: Final = 50  # told at once

RETRIES: Final = 5
TIMEOUT_S: Final = 86_400
MAX_TOKENS: Final = 1_000_000
CONCURRENCY: Final = 64
BATCH_ITEMS: Final = 10_000
RUN_ITEMS: Final = 20_000  # of all batches of a run: one in another multiplies them
DYNAMIC_TASKS: Final = 32
ROUNDS: Final = 5
DEBATERS: Final = 16

RESULT_CHARS: Final = 1024 * 1024
STEPS: Final = 200_000  # of one evaluation; below 0.1 s
CHARS_PER_STEP: Final = 256  # what text and containers cost
FOR_DEPTH: Final = 2
TEMPLATE_TOKENS: Final = 20_000  # of all templates of a document; about 0.2 s
EXPRESSION_DEPTH: Final = 40

SCHEMA_BYTES: Final = 64 * 1024
SCHEMA_NODES: Final = 10_000  # with every `$ref` written out
SCHEMA_PATTERNS: Final = 64
SCHEMA_VALUES: Final = 1_000_000  # that are held to one
SCHEMA_STEPS: Final = 10_000_000  # its nodes times these values; below 0.3 s
SCHEMA_TOLD: Final = 10_000  # up to so many steps all problems are looked for; below 0.1 s
