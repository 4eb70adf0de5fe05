"""The configuration of O3 as frozen pydantic models: what may be set, its unit and its default.

    base.py       what every section shares: strictness, the checked text and number types
    server.py     server, store, bus, journal, billing, telemetry
    providers.py  providers: `shape: openai|anthropic|gemini`, `kind: local`, `kind: replay`
    catalog.py    keys, models, agents             tools.py     the tools of agents
    workflows.py  workflows, agents_plane            decision.py  decision
    root.py       `Settings`, the whole file, and the checks that cross its sections
    notices.py    what was configured and is not served yet, or should not be so
    reference.py  makes docs/configuration.md of all these
    explain.py    pydantic's errors in the words of the file

Nothing here reads a file or the environment; `planes.config_file` does. A value that is wrong is
a `pydantic.ValidationError`, whose text never shows the value.
"""

from planes.settings.catalog import Agent, Candidate, Key, KeyStatus, Model, Price
from planes.settings.decision import (
    ChatLogprobsBackend,
    Decision,
    DecisionBackend,
    DecisionModel,
    DecisionPrice,
    Media,
    SystemOneBackend,
    SystemZeroBackend,
)
from planes.settings.explain import Complaint, explain
from planes.settings.notices import cannot_start, notices, risks
from planes.settings.providers import (
    HttpProvider,
    LocalProvider,
    Provider,
    ReplayProvider,
    Shape,
)
from planes.settings.root import Settings
from planes.settings.server import Billing, Bus, Journal, Server, Store, Telemetry, Webhook
from planes.settings.tools import HttpTool
from planes.settings.workflows import (
    AgentsPlane,
    DurableEngine,
    EmbeddedEngine,
    Engine,
    HttpEngine,
    Workflows,
)

__all__ = [
    "Agent",
    "AgentsPlane",
    "Billing",
    "Bus",
    "Candidate",
    "ChatLogprobsBackend",
    "Complaint",
    "Decision",
    "DecisionBackend",
    "DecisionModel",
    "DecisionPrice",
    "DurableEngine",
    "EmbeddedEngine",
    "Engine",
    "HttpEngine",
    "HttpProvider",
    "HttpTool",
    "Journal",
    "Key",
    "KeyStatus",
    "LocalProvider",
    "Media",
    "Model",
    "Price",
    "Provider",
    "ReplayProvider",
    "Server",
    "Settings",
    "Shape",
    "Store",
    "SystemOneBackend",
    "SystemZeroBackend",
    "Telemetry",
    "Webhook",
    "Workflows",
    "cannot_start",
    "explain",
    "notices",
    "risks",
]
