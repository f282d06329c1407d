"""One TOML file describes a run. Every key is checked, every error names key, value and remedy.

`load(path, overrides)` reads the file, applies dotted overrides (`trainer.lr=1e-5`) and returns a frozen `Config`.
"""

from __future__ import annotations

import dataclasses
import difflib
import tomllib
import types
import typing
from pathlib import Path
from typing import Any, Literal

import tomli_w
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from staleflow.coordination.settings import CoordinationSettings
from staleflow.learning.settings import AlgorithmSettings, ModelSettings, OptimizerSettings
from staleflow.rewards.spec import RewardSpec

Fraction = typing.Annotated[float, Field(ge=0.0, le=1.0)]
Positive = typing.Annotated[int, Field(ge=1)]
Seconds = typing.Annotated[float, Field(gt=0.0)]


class ConfigError(ValueError):
    """What the user wrote cannot be run; the message is one line per fault."""


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)  # built once, inside Config


class Run(Section):
    """The run as a whole."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    steps: Positive
    seed: int = 0
    dir: Path = Path("runs")


class Source(Section):
    """One data set: a JSONL or Parquet file, or a folder written by `datasets`."""

    path: Path
    weight: float = Field(1.0, gt=0.0)


class Data(Section):
    train: tuple[Source, ...] = Field(min_length=1)
    prompt_field: str = "prompt"
    answer_field: str = "answer"
    reference_fields: tuple[str, ...] = ()  # further fields that the reward needs
    chat_template: bool = False
    system_prompt: str | None = None
    deduplicate: bool = False
    max_prompt_tokens: Positive
    epochs: Positive | None = None  # None: start again as often as the run needs
    shuffle: bool = True


class Staleness(Section):
    """The bound and the shape of a training batch (protocol.md)."""

    eta: int = Field(ge=0)
    batch_groups: Positive
    group_size: Positive
    spare_groups: int = Field(0, ge=0)
    spare_members: int = Field(0, ge=0)


class Rollout(Section):
    """The vLLM instances and how they sample."""

    instances: Positive
    tensor_parallel: Positive = 1
    engine: Literal["vllm", "scripted"] = "vllm"
    max_tokens: Positive
    max_model_len: Positive
    max_running: Positive = 64
    temperature: float = Field(1.0, gt=0.0)
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    top_k: int = Field(0, ge=0)  # 0: off
    stop: tuple[str, ...] = ()
    gpu_memory_utilization: float = Field(0.85, gt=0.0, lt=1.0)
    enforce_eager: bool = False
    kv_cache_tokens: Positive | None = None  # None: what vLLM finds room for
    step_ms: float = Field(2.0, ge=0.0)  # scripted engine only: the length of one step


class Trainer(Section):
    """Trainer ranks (FSDP2), and how a batch is cut for them."""

    ranks: Positive = 1
    microbatch_tokens: Positive = 16384


class Parameters(Section):
    transport: Literal["broadcast", "direct", "file"] = "broadcast"
    backend: Literal["auto", "gloo"] = "auto"  # auto: NCCL where every member has a GPU of its own
    wire_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    bucket_mib: float = Field(default=64.0, gt=0.0)
    delta: bool = False


class Checkpoint(Section):
    every_steps: int = Field(default=0, ge=0)  # 0: none but at a requested stop
    keep: Positive = 2
    resume: Literal["never", "auto", "must"] = "never"


class Evaluation(Section):
    data: tuple[Source, ...] = Field(min_length=1)
    every_steps: int = Field(0, ge=0)  # 0: only before the first and after the last step
    max_prompts: Positive | None = None
    samples: Positive = 1
    temperature: float = Field(0.0, ge=0.0)


class Fault(Section):
    """Time limits, and what a job survives."""

    start_timeout_s: Seconds = 600.0
    collective_timeout_s: Seconds = 120.0
    no_progress_s: Seconds = 600.0
    stop_grace_s: Seconds = 20.0
    survive_rollout: bool = False


class Observe(Section):
    tensorboard: bool = True
    live: Literal["auto", "always", "never"] = "auto"
    trace: bool = True  # spans of every rank, merged by `staleflow report RUN --trace`
    probe_tokens: int = Field(default=256, ge=0)  # tokens of the log-probability gap probe; 0: none
    audit_weights: bool = False  # keep every version's weights, for scoring segments again (tests)


class Window(Section):
    """Steps `[first, last]`, both included, on all ranks or on these. A rollout rank counts its versions as steps."""

    steps: tuple[int, int]
    ranks: Literal["all"] | tuple[int, ...] = "all"

    @model_validator(mode="after")
    def _in_order(self) -> Window:
        if not 0 <= self.steps[0] <= self.steps[1]:
            raise ValueError(f"steps = {list(self.steps)}: write the first and the last step, e.g. [10, 12]")
        return self

    def wants(self, rank: int) -> bool:
        return self.ranks == "all" or rank in self.ranks

    @property
    def ranks_text(self) -> str:
        """`all` or `0,3,4`, as launch/nsys.sh reads it."""
        return self.ranks if isinstance(self.ranks, str) else ",".join(map(str, self.ranks))


class Profile(Section):
    """Profilers for a few steps (docs/tuning.md)."""

    nsys: Window | None = None  # Nsight Systems, through launch/nsys.sh
    torch: Window | None = None  # torch.profiler


class Config(Section):
    run: Run
    model: ModelSettings
    data: Data
    staleness: Staleness
    rollout: Rollout
    trainer: Trainer = Trainer()
    optimizer: OptimizerSettings = OptimizerSettings()
    algorithm: AlgorithmSettings = AlgorithmSettings()
    reward: RewardSpec = RewardSpec()
    coordination: CoordinationSettings = CoordinationSettings()
    parameters: Parameters = Parameters()
    checkpoint: Checkpoint = Checkpoint()
    evaluation: Evaluation | None = None
    fault: Fault = Fault()
    observe: Observe = Observe()
    profile: Profile = Profile()

    @model_validator(mode="after")
    def _fits_together(self) -> Config:
        for fault in _contradictions(self):
            raise ValueError(fault)
        return self

    @property
    def members(self) -> int:
        """Trajectories dispatched per group."""
        return self.staleness.group_size + self.staleness.spare_members

    @property
    def run_dir(self) -> Path:
        return self.run.dir / self.run.name

    @property
    def device_ranks(self) -> int:
        """Trainer and rollout ranks together; each node adds one host rank."""
        return self.trainer.ranks + self.rollout.instances * self.rollout.tensor_parallel

    @property
    def longest_tokens(self) -> int:
        """Prompt and response of the longest legal trajectory."""
        return self.data.max_prompt_tokens + self.rollout.max_tokens


def _contradictions(c: Config) -> typing.Iterator[str]:
    if c.longest_tokens > c.rollout.max_model_len:
        yield (
            f"rollout.max_tokens = {c.rollout.max_tokens}: with data.max_prompt_tokens = {c.data.max_prompt_tokens} it "
            f"exceeds rollout.max_model_len = {c.rollout.max_model_len}; lower one of the two or raise the context"
        )
    if c.algorithm.advantage in ("grpo", "dr_grpo", "rloo") and c.staleness.group_size < 2:
        yield (
            f"staleness.group_size = {c.staleness.group_size}: algorithm.advantage = {c.algorithm.advantage!r} "
            "compares the members of a group and needs at least 2"
        )
    if c.trainer.microbatch_tokens < c.longest_tokens:
        yield (
            f"trainer.microbatch_tokens = {c.trainer.microbatch_tokens}: smaller than one longest trajectory "
            f"({c.longest_tokens} tokens); raise it"
        )
    per_step = c.staleness.batch_groups * c.staleness.group_size
    if per_step < c.trainer.ranks * c.algorithm.updates_per_step:
        yield (
            f"staleness.batch_groups = {c.staleness.batch_groups}: {per_step} trajectories a step cannot be divided "
            f"over trainer.ranks = {c.trainer.ranks} x algorithm.updates_per_step = {c.algorithm.updates_per_step}; "
            "raise it"
        )
    if c.fault.survive_rollout and (not c.checkpoint.every_steps or c.coordination.policy in ("pace", "drop", "wait")):
        yield (
            f"fault.survive_rollout = true: what a lost node had finished is read back from its spool, which is kept "
            f"with checkpoint.every_steps > 0 (now {c.checkpoint.every_steps}) and a policy with books (now "
            f"{c.coordination.policy!r}); change these, or switch it off"
        )
    yield from _transport_faults(c)
    if c.algorithm.temperature not in (1.0, c.rollout.temperature):
        yield (
            f"algorithm.temperature = {c.algorithm.temperature}: trainer and engine must use one temperature; "
            f"set rollout.temperature (now {c.rollout.temperature}) alone"
        )


def _transport_faults(c: Config) -> typing.Iterator[str]:
    """What `file` and `direct` cannot do."""
    transport = c.parameters.transport
    if transport == "broadcast":
        return
    if c.parameters.delta:
        yield f"parameters.delta = true: transport {transport!r} always carries whole versions; use 'broadcast'"
    if c.fault.survive_rollout:
        yield f"fault.survive_rollout = true: transport {transport!r} goes on with all its members; use 'broadcast'"
    if transport == "direct" and not _pull_together(c.coordination):
        yield (
            "parameters.transport = 'direct': all instances take each version together, but with "
            f"coordination.policy = {c.coordination.policy!r}, synchronization = {c.coordination.synchronization!r} "
            f"and partial_rollout = {str(c.coordination.partial_rollout).lower()} each takes it at its own time; set "
            "synchronization = 'greedy' and partial_rollout = true (or policy 'sync' or 'one_step'), or use 'broadcast'"
        )


def _pull_together(coordination: CoordinationSettings) -> bool:
    """Whether instances are told to Pull as soon as there is a version, or all wait until they are drained."""
    if coordination.policy in ("sync", "one_step"):
        return True
    own = coordination.synchronization if coordination.policy == "staleflow" else "greedy"
    return own == "drained" or (own == "greedy" and coordination.partial_rollout)


# ---- reading ---------------------------------------------------------------------------------------------------------


def load(path: Path | str, overrides: typing.Sequence[str] = ()) -> Config:
    """Read `path`, apply `section.key=value` overrides, check. Raises ConfigError."""
    path = Path(path)
    try:
        raw = tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; give the path of a TOML config, e.g. configs/demo.toml") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None
    for override in overrides:
        _apply(raw, override)
    return parse(raw, str(path))


def parse(raw: dict[str, Any], origin: str = "config") -> Config:
    """Check a plain dict. Raises ConfigError, one line per fault."""
    try:
        return Config.model_validate(raw)
    except ValidationError as error:
        raise ConfigError("\n".join(f"{origin}: {_explain(fault)}" for fault in error.errors())) from None


def dumps(config: Config) -> str:
    """The resolved config as TOML, ready to be read again."""
    return str(tomli_w.dumps(config.model_dump(mode="json", exclude_none=True)))


def _apply(raw: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    parts = key.strip().split(".")
    if not equals or len(parts) < 2:
        raise ConfigError(f"override {override!r}: write it as section.key=value, e.g. trainer.lr=1e-5")
    for part in parts[:-1]:
        raw = raw.setdefault(part, {})
        if not isinstance(raw, dict):
            raise ConfigError(f"override {override!r}: {part!r} is not a section")
    raw[parts[-1]] = _value(text.strip())


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        return text  # a bare word is a string


def _explain(fault: Any) -> str:
    place = [str(part) for part in fault["loc"]]
    key = ".".join(place) or "config"
    if fault["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        known = _known_keys(place[:-1])
        near = difflib.get_close_matches(place[-1], known, 1, 0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"known here: {', '.join(sorted(known))}"
        return f"{key} = {fault['input']!r}: unknown key; {hint}"
    if fault["type"] == "missing":
        return f"{key}: missing; add it"
    message = str(fault["msg"]).removeprefix("Value error, ")
    if not place or message.startswith(place[0]):
        return message  # it names its key already
    return f"{key} = {fault['input']!r}: {message[0].lower()}{message[1:]}"


def _known_keys(place: list[str]) -> list[str]:
    section: Any = Config
    for part in place:
        if not part.isdigit():
            section = _section_of(typing.get_type_hints(section)[part])
    return _keys_of(section)


def _keys_of(section: Any) -> list[str]:
    if dataclasses.is_dataclass(section):
        return [f.name for f in dataclasses.fields(section)]
    return list(section.model_fields)


def _section_of(annotation: Any) -> Any:
    """The section (a pydantic model or a settings dataclass) inside `X`, `X | None` or `tuple[X, ...]`."""
    if isinstance(annotation, type) and (issubclass(annotation, Section) or dataclasses.is_dataclass(annotation)):
        return annotation
    if isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is not None:
        for argument in typing.get_args(annotation):
            if (found := _section_of(argument)) is not None:
                return found
    return None
