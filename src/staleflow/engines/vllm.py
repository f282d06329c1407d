"""The real engine: vLLM's LLMEngine in this process, stepped by the rollout rank.

Facts it rests on (vLLM 0.32): with `external_launcher` one worker lives in each rank and the instance's ranks must
schedule alike; the default process group must be the instance's own; `reset_prefix_cache` refuses while requests run.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from staleflow.engines.base import Delta, Load, Request
from staleflow.trajectories.schema import Finish

_FINISH = {None: Finish.PARTIAL, "stop": Finish.STOP, "length": Finish.LENGTH, "abort": Finish.ABORTED}


@dataclass(frozen=True)
class VllmSettings:
    """Everything the engine is built from. `instance_name` must be unique on the node (it names shared memory)."""

    model: Path
    dtype: str
    seed: int
    max_model_len: int
    max_running: int
    tensor_parallel: int
    instance_name: str
    instance_rank: int
    device: int
    gpu_memory_utilization: float
    enforce_eager: bool
    kv_cache_tokens: int | None
    top_p: float
    top_k: int
    stop: tuple[str, ...]


def environment(cpu: bool) -> dict[str, str]:
    """Variables that must be set before vLLM is imported. One thread per engine on the CPU: spinning threads on shared
    cores made a step six times slower."""
    always = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "HF_HUB_OFFLINE": "1",
    }
    on_cpu = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    return always | (on_cpu if cpu else {})


class VllmEngine:
    """See `engines.base.Engine`."""

    def __init__(self, settings: VllmSettings) -> None:
        from vllm import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        self._settings = settings
        self._engine = LLMEngine.from_engine_args(EngineArgs(**_engine_args(settings)))
        core = self._engine.engine_core.engine_core  # in-process: VLLM_ENABLE_V1_MULTIPROCESSING=0
        self._scheduler = core.scheduler
        self._runner = core.model_executor.driver_worker.worker.model_runner
        cache = self._engine.vllm_config.cache_config
        self._kv_capacity = int(cache.num_gpu_blocks) * int(cache.block_size)
        self._eos = _eos_ids(self._engine.model_config)
        self._request_of: dict[int, str] = {}
        self._added = 0

    def add(self, request: Request) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        greedy = request.temperature == 0
        params = SamplingParams(
            temperature=request.temperature,
            top_p=1.0 if greedy else self._settings.top_p,
            top_k=0 if greedy else self._settings.top_k,
            seed=request.seed,
            max_tokens=request.max_new,
            logprobs=0,
            flat_logprobs=True,
            stop_token_ids=None if request.ignore_eos else self._eos,
            ignore_eos=request.ignore_eos,
            stop=list(self._settings.stop) or None,
            include_stop_str_in_output=bool(self._settings.stop),
            detokenize=bool(self._settings.stop),
            output_kind=RequestOutputKind.DELTA,
        )
        self._added += 1
        name = f"{request.tid}/{self._added}"
        self._request_of[request.tid] = name
        self._engine.add_request(name, {"prompt_token_ids": list(request.tokens)}, params)

    def step(self) -> list[Delta]:
        deltas = []
        for output in self._engine.step():
            completion = output.outputs[0]
            tid = int(output.request_id.split("/")[0])
            finish = _FINISH[completion.finish_reason]
            if finish is not Finish.PARTIAL:
                self._request_of.pop(tid, None)
            deltas.append(Delta(tid, completion.token_ids, completion.logprobs.logprobs, finish))
        return deltas

    def abort(self, tids: Iterable[int]) -> None:
        names = [name for tid in tids if (name := self._request_of.pop(tid, None)) is not None]
        if names:
            self._engine.abort_request(names)

    def busy(self) -> bool:
        return bool(self._engine.has_unfinished_requests())

    def load(self) -> Load:
        usage = float(self._scheduler.kv_cache_manager.usage)
        waiting = len(self._scheduler.waiting)
        return Load(len(self._scheduler.running), waiting, int(usage * self._kv_capacity), self._kv_capacity)

    def load_weights(self, weights: Iterable[tuple[str, Any]]) -> None:
        self._runner.reload_weights(weights_iterator=weights)
        if self._engine.vllm_config.device_config.device_type == "cpu":
            _pack_experts(self._runner.get_model())
            _pack_tied_head(self._runner.get_model())

    def reset_prefix_cache(self) -> bool:
        return bool(self._engine.reset_prefix_cache())

    def score(self, tokens: Sequence[int]) -> list[float]:
        from vllm import SamplingParams

        params = SamplingParams(temperature=1.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
        self._added += 1
        self._engine.add_request(f"score/{self._added}", {"prompt_token_ids": list(tokens)}, params)
        outputs: list[Any] = []
        while self._engine.has_unfinished_requests():
            outputs += self._engine.step()
        scored = next(o.prompt_logprobs for o in outputs if o.prompt_logprobs)
        return [entry[token].logprob for entry, token in zip(scored[1:], tokens[1:], strict=True)]

    def close(self) -> None:
        """Takes down vLLM's groups and the default process group too; it must not be destroyed a second time."""
        self._engine.engine_core.shutdown()


def _pack_experts(model: Any) -> None:
    """Experts on the CPU: the kernel reads them packed, and vLLM packs them at the first load only, not at a reload."""
    for module in model.modules():
        kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
        if kernel is not None:
            kernel.fused_experts.process_weights_after_loading(module)


def _pack_tied_head(model: Any) -> None:
    """Output weights that are the embeddings are no weights of a reload, but their kernel on the CPU reads a packed
    copy of its own: without this it would go on with that of the first load."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    layers = [layer for layer in model.modules() if isinstance(layer, VocabParallelEmbedding)]
    embeddings = {layer.weight.data_ptr() for layer in layers if not isinstance(layer, ParallelLMHead)}
    for layer in layers:
        if isinstance(layer, ParallelLMHead) and layer.weight.data_ptr() in embeddings:
            layer.quant_method.process_weights_after_loading(layer)


def _engine_args(s: VllmSettings) -> dict[str, Any]:
    args: dict[str, Any] = {
        "model": str(s.model),
        "dtype": s.dtype,
        "seed": s.seed,
        "enforce_eager": s.enforce_eager,
        "max_model_len": s.max_model_len,
        "max_num_seqs": s.max_running,
        "tensor_parallel_size": s.tensor_parallel,
        "distributed_executor_backend": _executor(s),
        "gpu_memory_utilization": s.gpu_memory_utilization,
        "logprobs_mode": "processed_logprobs",  # at the sampling temperature, as the trainer computes them
        "disable_log_stats": True,
        "skip_tokenizer_init": not s.stop,
    }
    if s.kv_cache_tokens is not None:
        from vllm.platforms import current_platform

        block = 128 if current_platform.is_cpu() else args.setdefault("block_size", 16)
        args["num_gpu_blocks_override"] = -(-s.kv_cache_tokens // block)
    return args


def _executor(s: VllmSettings) -> type:
    """`external_launcher`, with a name of its own per instance and the planned device instead of LOCAL_RANK's."""
    from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

    port = os.environ["MASTER_PORT"]

    class InstanceExecutor(ExecutorWithExternalLauncher):
        def _distributed_args(self) -> tuple[str, int, int]:
            return f"env://:{s.instance_name}-{port}", s.instance_rank, s.device

    return InstanceExecutor


def _eos_ids(model_config: Any) -> list[int]:
    eos = model_config.hf_config.eos_token_id
    generation = model_config.try_get_generation_config().get("eos_token_id")
    ids: set[int] = set()
    for value in (eos, generation):
        ids.update(value if isinstance(value, list) else [] if value is None else [value])
    return sorted(ids)
