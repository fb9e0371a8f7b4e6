"""The other arm of two comparisons: vLLM, in an environment of its own.

Run by that environment's interpreter, it imports nothing of `paged`. It reads one JSON object a line from stdin and
answers each with one JSON object on a line of the descriptor that stdout had; what vLLM prints goes to stderr.

    {"do": "control", "lens": [512, …], "steps": 200, "page": 16}     one pass of `KVCacheManager.allocate_slots`
    {"do": "load", "model": DIR, "prompts": [[…], …], "new": 64, …}   an `LLM` and its warm-up
    {"do": "offline"}                                                 one pass over the loaded prompts

`other_arm.py` is what talks to it.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from typing import Any


def control(lens: list[int], steps: int, page: int) -> dict[str, Any]:
    """Microseconds of CPU time in which `allocate_slots` serves one decode step of these requests, median of steps.

    No prefix cache, full attention, one group of layers: the least that the manager can do. The requests' own
    bookkeeping (`num_computed_tokens`, the token that was generated) is not timed.
    """
    import torch
    from vllm.sampling_params import SamplingParams
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.request import Request

    longest = max(lens) + steps + page
    blocks = len(lens) * -(-longest // page) + 1
    spec = FullAttentionSpec(block_size=page, num_kv_heads=1, head_size=64, dtype=torch.bfloat16)
    config = KVCacheConfig(blocks, [], [KVCacheGroupSpec(["layer"], spec)])
    manager = KVCacheManager(config, longest, page, page, enable_caching=False)
    requests = []
    for number, length in enumerate(lens):
        sampling = SamplingParams(max_tokens=steps + 1, ignore_eos=True)
        request = Request(str(number), [1] * length, sampling, None)
        assert manager.allocate_slots(request, length) is not None
        request.num_computed_tokens = length
        request.append_output_token_ids(1)
        requests.append(request)
    times = []
    for _ in range(steps):
        start = time.thread_time()
        for request in requests:
            if manager.allocate_slots(request, 1) is None:
                raise RuntimeError("out of blocks")
        times.append(time.thread_time() - start)
        for request in requests:
            request.num_computed_tokens += 1
            request.append_output_token_ids(1)
    return {"us": statistics.median(times) * 1e6}


class Offline:
    """An `LLM` on CPU and the prompts of a run."""

    def __init__(self, model: str, prompts: list[list[int]], new: int, kv_gib: int, seqs: int):
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(kv_gib)
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        import vllm

        self.version = vllm.__version__
        self.llm = vllm.LLM(
            model,
            skip_tokenizer_init=True,
            dtype="float32",
            max_model_len=2048,
            max_num_seqs=seqs,
            enable_prefix_caching=False,
            disable_log_stats=True,
        )
        self.prompts = [{"prompt_token_ids": prompt} for prompt in prompts]
        self.sampling = vllm.SamplingParams(
            temperature=0.0, max_tokens=new, min_tokens=new, ignore_eos=True, detokenize=False
        )

    def run(self) -> dict[str, Any]:
        """Wall and CPU seconds (all threads of this process) of one pass, and the tokens."""
        cpu, wall = time.process_time(), time.perf_counter()
        outputs = self.llm.generate(self.prompts, self.sampling, use_tqdm=False)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        return {"wall_s": wall, "cpu_s": cpu, "tokens": [list(o.outputs[0].token_ids) for o in outputs]}


def main() -> None:
    """Serve requests until stdin ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    offline: Offline | None = None
    for line in sys.stdin:
        request = json.loads(line)
        do = request.pop("do")
        if do == "control":
            answer = control(**request)
        elif do == "load":
            offline = Offline(**request)
            answer = {"version": offline.version}
        else:
            assert offline is not None, "load first"
            answer = offline.run()
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
