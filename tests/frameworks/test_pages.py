"""The pages are true: their Python runs, their tables say what the code does, and what they link to is there.

Every block of Python of a page runs, one after the other in one program, on all ranks of a group. `BEFORE` gives a
block what its page only talks about. A block that cannot run here is listed in `NOT_HERE`, with the reason.
"""

from __future__ import annotations

import collections
import inspect
import os
import re
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from bodies.roundings import roundings
from distributed.harness import Rank, run
from markdown_it import MarkdownIt
from processes import GROUP_TIMEOUT, ROOT

import ringreduce
from ringreduce import cli, data, elastic, parameter_server, plan
from ringreduce.errors import InvalidArgument
from ringreduce.groups.between_hosts import PACKED, Wire
from ringreduce.plan import across_hosts

PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])

BEFORE = {
    "docs/memory.md: model = MyModel()": """
def MyModel():
    model = torch.nn.Linear(1000, 1000)
    model.weight.grad = torch.ones(1000, 1000)
    return model
dist.init_process_group("ringreduce")""",
    "docs/plans.md: def one_shot(size)": "dist.init_process_group('ringreduce')",
    "docs/seeing.md: dump_flight_record": """
dist.init_process_group("ringreduce")
dist.all_reduce(torch.ones(3))
folder = "."
""",
    "docs/training.md: fullgraph=True": """
import functools
dist.init_process_group("ringreduce")
torch.compile = functools.partial(torch.compile, backend="aot_eager")  # the C++ compiler takes long
""",
    "docs/elastic.md: agreed = ringreduce.agree()": """
import ringreduce
dist.init_process_group("ringreduce")
def train_step():
    raise ringreduce.errors.CollectiveTimeout("a step took too long")""",
    "docs/parameter_server.md: users = ps.Embedding": """
kv = ps.join()
head, loss_of = torch.nn.Linear(64, 1), lambda out, labels: (out - labels).square().mean()
next_ids = torch.arange(8)
batches = [(next_ids, torch.zeros(8, 1))] * 3""",
    "docs/parameter_server_running.md: backups=1": "import ringreduce.parameter_server as ps",
}
"""Page and text of a block: what has to be there before it runs."""

AFTER = {
    "docs/parameter_server.md: users = ps.Embedding": "users.flush(); kv.barrier(); kv.leave()",
    "docs/parameter_server_running.md: backups=1": "kv.barrier(); kv.leave()",
}

NOT_HERE = {
    "docs/data.md: import pyarrow": "needs pyarrow: test_data_files.py",
    "docs/elastic.md: # train.py": "test_examples.py runs it under torchrun and `ringreduce keep`",
    "docs/elastic.md: etcd://": "needs etcd: distributed/test_elastic_etcd.py",
    "docs/elastic.md: ProcessGroupRingReduce": "needs torchft: test_ecosystem.py",
    "docs/gpu.md: torch.cuda.set_device": "needs GPUs: tests/gpu",
    "docs/operators.md: Op.numba": "needs Numba: distributed/test_operators.py",
    "docs/parameter_server.md: ps.attach(": "parameter_server/test_documentation.py trains with it",
    "docs/parameter_server.md: .follow(policy": "parameter_server/test_readers.py follows a model",
    "docs/parameter_server_running.md: workers=8": "needs several hosts: parameter_server/test_serve.py",
    "docs/parameter_server_running.md: kv.snapshot(": "parameter_server/test_documentation.py saves with it",
    "docs/parameter_server_running.md: kv.restore(": "parameter_server/test_documentation.py restores with it",
}
"""Page and text of a block: why it does not run here, and what tests it."""

RANKS = {"docs/plans.md": 4}


class Block(NamedTuple):
    page: str
    line: int
    code: str

    def among(self, listed: dict[str, str]) -> str | None:
        """What is listed for this block."""
        found = [key for key in listed if key.startswith(f"{self.page}: ") and key.partition(": ")[2] in self.code]
        assert len(found) <= 1, f"{self.page}:{self.line} is listed twice: {found}"
        return listed[found[0]] if found else None


def fences(page: Path) -> Iterator[tuple[str, Block]]:
    """The language of each block of code, and the block."""
    for token in MarkdownIt("commonmark").parse(page.read_text()):
        if token.type in ("fence", "code_block"):
            assert token.map
            language = token.info.strip() if token.type == "fence" else ""
            yield language, Block(str(page.relative_to(ROOT)), token.map[0] + 1, token.content)


BLOCKS = [block for page in PAGES for language, block in fences(page) if language == "python"]


@pytest.mark.parametrize("page", sorted({block.page for block in BLOCKS}))
def test_its_python_runs(page: str, tmp_path: Path) -> None:
    blocks = [each for each in BLOCKS if each.page == page and each.among(NOT_HERE) is None]
    if not blocks:
        pytest.skip("; ".join(f"{each.line}: {each.among(NOT_HERE)}" for each in BLOCKS if each.page == page))
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    run(program, RANKS.get(page, 2), blocks, store.port, str(tmp_path))


def program(me: Rank, blocks: list[Block], port: int, folder: str) -> None:
    """As torchrun starts it, with the agent's store."""
    os.environ |= {"RANK": str(me.rank), "LOCAL_RANK": str(me.rank), "WORLD_SIZE": str(me.size)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    os.chdir(folder)
    dist.distributed_c10d.default_pg_timeout = timedelta(seconds=GROUP_TIMEOUT)
    known: dict[str, Any] = {"torch": torch, "dist": dist}
    for block in blocks:
        exec(block.among(BEFORE) or "", known)
        # With the lines of the page, for tracebacks.
        exec(compile("\n" * block.line + block.code, ROOT / block.page, "exec"), known)
        exec(block.among(AFTER) or "", known)
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize("listed", [BEFORE, AFTER, NOT_HERE], ids=["before", "after", "not here"])
def test_what_is_listed_is_there(listed: dict[str, str]) -> None:
    for key in listed:
        assert len([block for block in BLOCKS if block.among({key: ""}) is not None]) == 1, key


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_blocks_say_their_language(page: Path) -> None:
    """Else Python could be there that no test runs."""
    for language, block in fences(page):
        assert language, f"{block.page}:{block.line}: write ```python, ```bash or ```text"
        looks_like_python = re.search(r"^(import \w+|from \w+ import|\w+ = \w+\.\w+\(|dist\.)", block.code, re.M)
        assert language in ("python", "{eval-rst}") or not looks_like_python, f"{block.page}:{block.line} is Python"


def test_readme_has_the_groups_of_the_site() -> None:
    """In the same words and order; each link has the title of its page, which the site lists in that group."""
    index, readme = (ROOT / "docs/index.md").read_text(), (ROOT / "README.md").read_text()
    site = dict(re.findall(r"```{toctree}\n:caption: (.+)\n:hidden:\n\n([^`]+)", index))
    rows = re.findall(r"^\| \*\*(.+)\*\* \| (.+) \|$", readme.partition("## Where to read on")[2], re.M)
    assert [group for group, _ in rows] == list(site)
    for group, links in rows:
        for text, target in re.findall(r"\[(.+?)\]\((.+?)\)", links):
            assert (ROOT / target).read_text().startswith(f"# {text}\n")
            assert not target.startswith("docs/") or target[5:-3] in site[group].split(), target


def test_links_say_what_they_lead_to() -> None:
    for page in PAGES:
        assert re.findall(r"\[`?[\w/]+\.md`?\]\(", page.read_text()) == [], page


@pytest.mark.parametrize("page", sorted(ROOT.glob("*.md")), ids=lambda page: page.name)
def test_what_it_links_to_is_there(page: Path) -> None:
    """`make docs` checks the pages of the site."""
    for target in re.findall(r"\]\((?!http)([^)#\s]+)[^)]*\)", page.read_text()):
        assert (page.parent / target).exists(), target


def test_commands_are_there() -> None:
    """Of blocks of bash and of text in backticks: programs of this tree, targets of make, our commands' options."""
    parser = cli.Parser(prog="ringreduce").add_subparsers(parser_class=cli.Parser)
    for name in cli.COMMANDS:
        cli.add_command(parser, name)
    lines = [
        line
        for page in PAGES
        for language, block in fences(page)
        if language == "bash"
        for line in block.code.splitlines()
    ]
    spans = {span for page in PAGES for span in re.findall(r"`([^`]+)`", page.read_text())}
    for line in (*lines, *sorted(spans)):
        words = " ".join(line.partition(" #")[0].replace("...", "").replace("|", " ").split())
        for program in re.findall(r"\b(?:bench|examples|tests)/[\w/]+\.(?:py|cpp)\b", words):
            assert (ROOT / program).exists(), line
        if target := re.match(r"make ([a-z0-9-]+)", words):
            assert re.search(rf"^{target[1]}:", (ROOT / "Makefile").read_text(), re.M), line
        command = re.search(r"\bringreduce (\w+)((?: --[\w-]+)*)", words)
        if command and (command[1] in cli.COMMANDS or "--" in command[2]):
            known = parser.choices[command[1]].format_help()
            for option in re.findall(
                r" (--[\w-]+)", words.partition(f"ringreduce {command[1]}")[2].partition("python ")[0]
            ):
                assert option in known, line


def test_no_sentence_stands_in_two_pages() -> None:
    """Of those with more than eight words: where two pages need one, a link leads to it."""
    pages = collections.defaultdict(set)
    for page in PAGES:
        text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
        for part in re.split(r"\n\s*\n|\n(?=[-|#])| \| ", text):
            plain = re.sub(r"\]\([^)]*\)|[\[*`|\]]", "", part)
            for sentence in re.split(r"(?<=[.:;])\s", " ".join(plain.split())):
                if len(sentence.split()) > 8:
                    pages[sentence.strip("- .:;").lower()].add(page.name)
    assert {sentence: found for sentence, found in pages.items() if len(found) > 1} == {}


def test_the_reference_has_every_public_name() -> None:
    said = {path.stem: path.read_text() for path in ROOT.glob("docs/reference/*.md")}
    torch_s_own = {name for name in ringreduce.__all__ if getattr(ringreduce, name).__module__.startswith("torch")}
    for name in (*ringreduce.__all__, *torch_s_own):
        assert re.search(rf"\b{name}\b", said["ringreduce"] + said["packages"]), f"ringreduce.{name}"
    assert ":members:" in said["packages"] and parameter_server.__all__
    for package in (data, elastic):
        for name, value in vars(package).items():
            if isinstance(value, type) or callable(value):
                assert re.search(rf"\b{name}\b", said["packages"]), f"{package.__name__}.{name}"
    for name, value in vars(ringreduce.errors).items():
        if isinstance(value, type) and value.__module__ == "ringreduce.errors":
            assert re.search(rf"\b{name}\b", said["ringreduce"]), f"errors.{name}"


def rows_of(section: str, page: str = "support") -> list[list[str]]:
    """The heading and the rows of the table of a section."""
    text = (ROOT / f"docs/{page}.md").read_text().partition(f"## {section}\n")[2].partition("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")]
    return [rows[0], *rows[2:]]


OPS = {"premul_sum": dist._make_nccl_premul_sum(0.5)}


def test_dtypes_that_the_table_has() -> None:
    heading, *rows = rows_of("Dtypes")
    operations = [re.findall(r"[A-Z]{2,}|premul_sum", cell) for cell in heading]
    said = {}
    for names, *cells in rows:
        for dtype in names.split(", "):
            said[dtype] = {op: cell == "yes" for ops, cell in zip(operations[1:], cells, strict=True) for op in ops}
            said[dtype]["moved"] = cells[0] == "yes"
    run(dtypes, 2, said)


def dtypes(me: Rank, said: dict[str, dict[str, bool]]) -> None:
    others, quantized = said.pop("every other dtype that is not quantized"), said.pop("quantized")
    with me.join():
        for dtype in {each for each in vars(torch).values() if isinstance(each, torch.dtype)}:
            name = str(dtype).removeprefix("torch.")
            tensor = torch.empty(4, dtype=torch.uint8).fill_(1).repeat(dtype.itemsize)
            if name in ("qint8", "quint8", "qint32", "quint4x2", "quint2x4"):
                tensor = torch._empty_affine_quantized([4], scale=1.0, zero_point=0, dtype=dtype)
            else:
                tensor = tensor.view(dtype)
            expected = quantized if tensor.is_quantized else said.pop(name, others)
            for what, works in expected.items():
                try:
                    if what == "moved":
                        ringreduce.broadcast(tensor, 0)
                    else:
                        ringreduce.all_reduce(tensor, OPS.get(what) or getattr(dist.ReduceOp, what))
                    assert works, f"{what} of {name} works"
                except InvalidArgument as error:
                    assert not works, f"{what} of {name}: {error}"
    assert not said, f"torch has no such dtypes: {said}"


def test_roundings_that_the_table_has() -> None:
    """Of the plans among n ranks, and of those among n hosts with one or several ranks each."""
    heading, *rows = rows_of("Rounding and overflow")
    said = {name: list(map(int, cells)) for names, _, *cells in rows for name in re.findall(r"`(\w+)`", names)}
    known: set[str] = set()
    for collective in ("all_reduce", "reduce", "reduce_scatter"):
        for name in across_hosts.ACROSS[collective]:
            known.add(name)
            for n, most in zip((int(cell.removeprefix("n = ")) for cell in heading[2:]), said[name], strict=True):
                if name in plan.BUILDERS[collective]:
                    assert roundings(plan.build(collective, name, n)) == most, (collective, name, n)
                for ranks in (1, 2, 3) if n <= 4 else ():
                    hosts = [list(range(host * ranks, host * ranks + ranks)) for host in range(n)]
                    found = roundings(across_hosts.build(collective, name, hosts))
                    assert found == most + (ranks > 1), (collective, name, n, ranks)
    assert said.keys() == known


def test_sizes_that_are_too_small_to_compress() -> None:
    """Those of one_shot, where all ranks complete the sum, so that it may not be rounded."""

    def least(shape: str, network: str, packed: float = 1.0) -> int:
        (number, ranks), (gigabits, delay) = map(int, shape.split(", ")), map(int, re.findall(r"\d+", network))
        hosts = [list(range(host * ranks, host * ranks + ranks)) for host in range(number)]
        chosen = across_hosts.choose("all_reduce", hosts, delay * 1e-6, gigabits / 8 * 1e9, packed=packed)
        return max(end for _, end, each in chosen if each.name.endswith("one_shot") and end)

    (_, *networks), *rows = rows_of("What is too small", "compression")
    for shape, *cells in rows:
        for network, cell in zip(networks, cells, strict=True):
            assert least(shape, network) == int(cell.removesuffix(" KB")) * 1024, (shape, network)
    assert least("2, 1", networks[0], PACKED["int8"]) == 32 * 1024
    assert networks[0] == f"{Wire().bandwidth * 8e-9:.0f} Gbit/s, {Wire().latency * 1e6:.0f} us"


CALLS: dict[str, Callable[[Any, Any, int], None]] = {
    "all_reduce": lambda of, out, size: ringreduce.all_reduce(of),
    "reduce": lambda of, out, size: ringreduce.reduce(of, 0),
    "reduce_scatter": lambda of, out, size: ringreduce.reduce_scatter(out, [of] * size),
    "reduce_scatter_single": lambda of, out, size: ringreduce.reduce_scatter_single(out, of),
    "all_gather": lambda of, out, size: ringreduce.all_gather([out] * size, of),
    "all_gather_single": lambda of, out, size: ringreduce.all_gather_single(out, of),
    "broadcast": lambda of, out, size: ringreduce.broadcast(of, 0),
    "gather": lambda of, out, size: ringreduce.gather(of, [out] * size, 0),
    "scatter": lambda of, out, size: ringreduce.scatter(out, [of] * size, 0),
    "all_to_all": lambda of, out, size: ringreduce.all_to_all([out] * size, [of] * size),
    "all_to_all_single": lambda of, out, size: ringreduce.all_to_all_single(out, of),
    "send": lambda of, out, size: ringreduce.send(of, 0),
    "recv": lambda of, out, size: ringreduce.recv(out, 0),
}


def test_calls_that_the_table_has() -> None:
    _, *rows = rows_of("Calls")
    said = {name: cells for names, *cells in rows for name in re.findall(r"`(\w+)`", names)}
    assert said.keys() == CALLS.keys() | {"barrier", "monitored_barrier"}
    run(calls, 2, said)


def calls(me: Rank, said: dict[str, list[str]]) -> None:
    """Those that reduce take an `op`; each takes sparse tensors or refuses them."""
    with me.join():
        for name, call in CALLS.items():
            reduces, sparse, *_ = said[name]
            assert ("op" in inspect.signature(getattr(ringreduce, name)).parameters) == (reduces == "yes"), name
            try:
                call(torch.eye(4).to_sparse(), torch.eye(4).to_sparse(), me.size)
                assert sparse != "no", f"{name} takes sparse tensors"
            except InvalidArgument as error:
                assert sparse == "no", f"{name}: {error}"


DIFFERS = r"\d[\d.]*|'[^']*'|[()\[\]:;,=]|\.(?: |$)|\.\.\.|\w+_\w+|\b(?:x|rank|lo|eth|u?int|float)(?=\d|\b)"
"""What a message has of the case: numbers, names, values."""
OF_TORCH = (
    "TypeError: ",
    "monitored_barrier is only implemented",
    "Unknown backend type",
    "Unknown c10d backend type",
    "sendBytes failed",
)
OF_SYSTEM = {"Address already in use", "Connection timed out", "No such file or directory"}


def test_messages_of_troubleshooting_are_those_of_the_code() -> None:
    """Every part of three words or more, between what differs from case to case."""
    page = (ROOT / "docs/troubleshooting.md").read_text()
    cells = [line.split(" | ")[0] for line in page.splitlines() if line.startswith("| `")]
    messages = [each for cell in cells for each in re.findall(r"`([^`]+)`", cell) if not each.startswith(OF_TORCH)]
    files = [path for folder in ("ringreduce", "csrc") for path in (ROOT / folder).rglob("*.*")]
    sources = " ".join(path.read_text() for path in files if path.suffix in (".py", ".cpp", ".h"))
    sources = " ".join(re.sub(r'"\s*f?"', "", sources).replace("`", "").split())  # literals over several lines
    parts = {part.strip() for message in messages for part in re.split(DIFFERS, message) if len(part.split()) > 2}
    assert len(parts) > 20
    assert [part for part in sorted(parts - OF_SYSTEM) if part not in sources] == []
