"""The workflow document (CNL) as typed values (cnl.md).

Text becomes these in `loading.load`, which also checks what no single field can tell: ids,
references, agents, depth. Templates, expressions and JSON Schemas are compiled in place.
"""

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Final, Literal, TypeAlias, get_args

from pydantic import BaseModel, ConfigDict, Field, Strict, StringConstraints

from relay.engines.embedded import limits
from relay.engines.embedded.fields import Answer, Items
from relay.engines.embedded.templates import Expression, Template

ID_PATTERN: Final = r"^[A-Za-z0-9_-]{1,64}$"
NAME_PATTERN: Final = r"^[A-Za-z][A-Za-z0-9_]{0,63}$"

Id: TypeAlias = Annotated[str, StringConstraints(pattern=ID_PATTERN)]
Variable: TypeAlias = Annotated[str, StringConstraints(pattern=NAME_PATTERN)]
Agent: TypeAlias = Annotated[str, StringConstraints(min_length=1, max_length=200)]
OnError: TypeAlias = Literal["fail", "skip", "continue"]
Concurrency: TypeAlias = Annotated[int, Field(ge=1, le=limits.CONCURRENCY)]


class Part(BaseModel):
    """A mapping of the document: its keys are known, its values have exact types."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, populate_by_name=False)


class TaskBase(Part):
    """What tasks of every kind have."""

    agents_in: ClassVar[tuple[str, ...]] = ()
    """The keys that name agents."""

    id: Id = Field(description="Names the task; unique in the document.")
    when: Expression | None = Field(
        default=None, description="The task is skipped if this expression is false."
    )
    retries: int = Field(
        default=0,
        ge=0,
        le=limits.RETRIES,
        description="How often it is tried again after a failure, after waits with full jitter.",
    )
    timeout_s: float | None = Field(
        default=None, gt=0, le=limits.TIMEOUT_S, description="Seconds that one attempt may take."
    )
    on_error: OnError | None = Field(
        default=None,
        description=(
            "What a failure does: `fail` ends the run, `skip` and `continue` go on; a skipped task"
            " has no output, one continued has `{error}`. Default: the workflow's."
        ),
    )

    def lists(self) -> tuple[tuple["Task", ...], ...]:
        """The lists of tasks in it."""
        return ()


class AgentTask(TaskBase):
    """Asks an agent once. Output: its text, or its JSON value."""

    agents_in = ("agent",)

    type: Literal["task"]
    agent: Agent = Field(description="Id of the agent.")
    prompt: Template = Field(description="What it is asked; a template.")
    max_tokens: int | None = Field(
        default=None, ge=1, le=limits.MAX_TOKENS, description="Bound of the reply, in tokens."
    )
    json_schema: Answer | None = Field(
        default=None,
        alias="json",
        description="JSON Schema: the reply is parsed and must fit, else the attempt has failed.",
    )


class Sequential(TaskBase):
    """Runs tasks one after the other. Output: the list of their outputs."""

    type: Literal["sequential"]
    tasks: "Tasks" = Field(description="Run in order.")

    def lists(self) -> tuple[tuple["Task", ...], ...]:
        return (self.tasks,)


class Parallel(TaskBase):
    """Runs tasks at the same time. Output: an object of their outputs by id."""

    type: Literal["parallel"]
    tasks: "Tasks" = Field(description="Run at the same time.")
    max_concurrency: Concurrency = Field(default=4, description="How many run at once.")

    def lists(self) -> tuple[tuple["Task", ...], ...]:
        return (self.tasks,)


class Condition(TaskBase):
    """Takes one of two branches. Output: that of the last task of the branch."""

    type: Literal["condition"]
    test: Expression = Field(alias="if", description="Which branch: `then` if it is true.")
    then: "Tasks" = Field(description="Run in order if it is true.")
    otherwise: "Tasks | None" = Field(
        default=None, alias="else", description="Run in order if it is false."
    )

    def lists(self) -> tuple[tuple["Task", ...], ...]:
        return (self.then,) if self.otherwise is None else (self.then, self.otherwise)


class Batch(TaskBase):
    """Runs one task for each item. Output: the list of its outputs, in the order of the items."""

    type: Literal["batch"]
    items: Items = Field(
        description="A list, whose entries are taken as they stand, or an expression for one."
    )
    variable: Variable = Field(
        default="item", alias="as", description="Name of the item in the task's templates."
    )
    task: "Task" = Field(description="Run once for each item.")
    concurrency: Concurrency = Field(default=4, description="How many items run at once.")

    def lists(self) -> tuple[tuple["Task", ...], ...]:
        return ((self.task,),)


class Dynamic(TaskBase):
    """Asks a planner for tasks and runs them in order. Output: the list of their outputs."""

    agents_in = ("planner", "agents")

    type: Literal["dynamic"]
    planner: Agent = Field(description="Id of the agent that proposes the tasks.")
    prompt: Template = Field(description="What the planner is asked; a template.")
    max_tasks: int = Field(
        default=8, ge=1, le=limits.DYNAMIC_TASKS, description="How many it may propose."
    )
    agents: Annotated[tuple[Agent, ...], Strict(False)] = Field(
        min_length=1, description="Ids of the agents that the tasks may be for."
    )


class Debate(TaskBase):
    """Lets agents argue in rounds and another one judge. Output: the judgment's text."""

    agents_in = ("debaters", "judge")

    type: Literal["debate"]
    debaters: Annotated[tuple[Agent, ...], Strict(False)] = Field(
        min_length=2, max_length=limits.DEBATERS, description="Ids of the agents that argue."
    )
    rounds: int = Field(ge=1, le=limits.ROUNDS, description="How often each of them speaks.")
    judge: Agent = Field(description="Id of the agent that judges.")
    prompt: Template = Field(description="What it is about; a template.")


class Yield(TaskBase):
    """Stops the run until it is given an answer. Output: the answer."""

    type: Literal["yield"]
    prompt: Template = Field(description="What is asked; a template.")
    answer_schema: Answer | None = Field(
        default=None, alias="schema", description="JSON Schema of the answer; default: anything."
    )


Task: TypeAlias = Annotated[
    AgentTask | Sequential | Parallel | Condition | Batch | Dynamic | Debate | Yield,
    Field(discriminator="type"),
]
Tasks: TypeAlias = Annotated[tuple[Task, ...], Strict(False), Field(min_length=1)]
KINDS: Final[dict[str, type[TaskBase]]] = {
    get_args(model.model_fields["type"].annotation)[0]: model
    for model in (AgentTask, Sequential, Parallel, Condition, Batch, Dynamic, Debate, Yield)
}


class Workflow(Part):
    """The tasks of a run, in order."""

    name: Id = Field(description="Names the workflow.")
    inputs: dict[Id, Any] = Field(
        default_factory=dict, description="Every input and its default; a run may set others."
    )
    on_error: Literal["fail", "continue"] = Field(
        default="fail", description="What the failure of a task does that does not say it itself."
    )
    timeout_s: float | None = Field(
        default=None, gt=0, le=limits.TIMEOUT_S, description="Seconds that the run may take."
    )
    output: Id | None = Field(
        default=None,
        description="Id of the task whose output is the run's; default: the last one that ran.",
    )
    tasks: "Tasks" = Field(description="Run in order, as those of a `sequential`.")

    def walk(self) -> Iterator[Task]:
        """All tasks, in the order of the document."""
        stack = list(reversed(self.tasks))
        while stack:
            task = stack.pop()
            yield task
            for tasks in reversed(task.lists()):
                stack.extend(reversed(tasks))


class WorkflowDocument(Part):
    """A workflow document."""

    workflow: Workflow


for _model in KINDS.values():
    _model.model_rebuild()
