"""README.md cannot rot (exact): its Python blocks run, its commands exist and run, its file tree is the one on disk.

`python` block            run as a program of its own, in an empty folder
`sh` block                `make X`: the target exists. `narrowgauge ...`: run, in a folder that all blocks share in order.
                          Commands in NOT_RUN are left to the reader; any other is an error, so that nothing is skipped unseen.
`text` block after the words "checked file tree": one entry a line, two spaces deeper than its folder, folders end in a slash,
                          a remark may follow after two spaces. A folder that is opened must be listed whole; hidden files
                          and `__init__.py` are left out.

An HTML comment right before a block says how the test differs from the reader:

    <!-- test: --training.steps 2 -->          sh: in the block's `narrowgauge train` commands, in the place of the same flags
    <!-- test: model = tiny() -->     python: put before the block; may span lines
    <!-- test skips: needs a GPU -->  not run, with the reason in the test's report
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.processes import PYTHON, ROOT, run_ok

README = (ROOT / "README.md").read_text(encoding="utf-8")
NOT_RUN = {"git", "pip", "cd", "python3", "source", "export"}
TREE_WORDS = "checked file tree"

_BLOCK = re.compile(
    r"(?:<!-- test(?P<skips> skips)?: (?P<note>.*?)-->\n\s*)?^```(?P<kind>\w+)\n(?P<text>.*?)^```",
    re.S | re.M,
)


@dataclass(frozen=True)
class Block:
    """One fenced block and the comment before it."""

    kind: str
    text: str
    note: str
    skips: bool
    line: int

    def __str__(self) -> str:
        return f"line{self.line}"

    def skip_if_asked(self) -> None:
        if self.skips:
            pytest.skip(f"README.md:{self.line}: {self.note}")


def blocks(readme: str, kind: str) -> list[Block]:
    found = []
    for match in _BLOCK.finditer(readme):
        line = readme.count("\n", 0, match.start("kind")) + 1
        note = (match["note"] or "").strip()
        found.append(Block(match["kind"], match["text"], note, bool(match["skips"]), line))
    return [block for block in found if block.kind == kind]


def commands(block: Block) -> list[list[str]]:
    """The words of each command; comments and prompts dropped, continued lines joined, the note appended to `train`."""
    lines = block.text.replace("\\\n", " ").splitlines()
    found = [
        words for line in lines if (words := shlex.split(line.removeprefix("$ "), comments=True))
    ]
    return [
        changed(words, shlex.split(block.note))
        if "narrowgauge" in words[:-1] and "train" in words
        else words
        for words in found
    ]


def changed(words: list[str], extra: list[str]) -> list[str]:
    """The command with the flags of the note, each in the place of the command's own."""
    given = {each for each in extra if each.startswith("--")}
    kept = [
        word
        for before, word in zip(["", *words], words, strict=False)
        if word not in given and before not in given
    ]
    return kept + extra


def run_command(words: list[str], folder: Path, where: str) -> None:
    """As a reader types it; `make X` as a dry run."""
    if words[0] == "make":
        run_ok(["make", "--dry-run", *words[1:]])
    elif words[0] == "narrowgauge":
        run_ok([PYTHON, "-m", *words], cwd=folder)
    elif words[0] == "python":
        run_ok([PYTHON, *words[1:]], cwd=folder)
    elif words[0] == "torchrun":
        run_ok([PYTHON, "-m", "torch.distributed.run", *words[1:]], cwd=folder)
    else:
        assert words[0] in NOT_RUN, f"{where}: this test does not know what to do with {words}"


def tree_entries(text: str) -> list[tuple[str, ...]]:
    """Paths of a file tree, as parts; folders keep their slash. The first line may name the root as './' or 'narrowgauge/'."""
    entries: list[tuple[str, ...]] = []
    for line in filter(str.strip, text.splitlines()):
        depth, odd = divmod(len(line) - len(line.lstrip()), 2)
        assert not odd, f"indented by an odd number of spaces: {line!r}"
        name = re.split(r"\s{2,}", line.strip())[0]
        assert " " not in name, f"one entry a line, remarks after two spaces: {line!r}"
        parents = entries[-1][:depth] if entries else ()
        assert len(parents) == depth and all(part.endswith("/") for part in parents), (
            f"no folder above {line!r}"
        )
        entries.append((*parents, name))
    return entries


def tree_differences(entries: list[tuple[str, ...]], on_disk: list[str]) -> list[str]:
    """What the listing has and the disk lacks, and what an opened folder lacks in the listing."""
    files = [(*(part + "/" for part in Path(name).parts[:-1]), Path(name).name) for name in on_disk]
    known = {path[:depth] for path in files for depth in range(1, len(path) + 1)}
    listed = set(entries)
    opened = {path[:-1] for path in entries}
    visible = {
        path for path in known if not (path[-1].startswith(".") or path[-1] == "__init__.py")
    }
    problems = [f"listed but not there: {''.join(path)}" for path in sorted(listed - known)]
    return problems + [
        f"there but not listed: {''.join(path)}"
        for path in sorted(visible - listed)
        if path[:-1] in opened
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the shell blocks run: examples/ is there, as in the checkout."""
    path = tmp_path_factory.mktemp("readme")
    shutil.copytree(ROOT / "examples", path / "examples")
    return path


@pytest.mark.slow
@pytest.mark.parametrize("block", blocks(README, "sh"), ids=str)
def test_the_commands_run(block, folder):
    block.skip_if_asked()
    for words in commands(block):
        run_command(words, folder, f"README.md:{block.line}")


@pytest.mark.slow
@pytest.mark.parametrize("block", blocks(README, "python"), ids=str)
def test_the_python_runs(block, tmp_path):
    block.skip_if_asked()
    program = tmp_path / "block.py"
    program.write_text(f"{block.note}\n{block.text}", encoding="utf-8")
    run_ok([PYTHON, "-W", "error", program.name], cwd=tmp_path)


def test_the_file_tree_is_the_one_on_disk():
    trees = blocks(README.partition(TREE_WORDS)[2], "text")
    if TREE_WORDS not in README:
        pytest.fail(f"README.md has no block after the words '{TREE_WORDS}'")
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        encoding="utf-8",
    )
    if listing.returncode:
        pytest.skip("not a git checkout: what belongs to the tree is unknown")
    on_disk = [name for name in listing.stdout.splitlines() if (ROOT / name).exists()]
    problems = tree_differences(tree_entries(trees[0].text), on_disk)
    assert not problems, "\n".join(["the file tree in README.md:", *problems])


SAMPLE = """
Text.

<!-- test: --training.steps 2
  --batch.size 1 -->
```sh
$ narrowgauge train --data "my text.txt" \\
    --recipe fp8  # a remark
make test ARGS="-k x"
```

<!-- test skips: needs a GPU -->
```python
print(1)
```

A checked file tree:

```text
Makefile
src/  the package
  a.py  one
docs/
```
"""


def test_blocks_are_understood():
    (shell,) = blocks(SAMPLE, "sh")
    train = [
        "narrowgauge",
        "train",
        "--data",
        "my text.txt",
        "--recipe",
        "fp8",
        "--training.steps",
        "2",
        "--batch.size",
        "1",
    ]
    assert commands(shell) == [train, ["make", "test", "ARGS=-k x"]]
    (program,) = blocks(SAMPLE, "python")
    assert (program.skips, program.note, program.text, program.line) == (
        True,
        "needs a GPU",
        "print(1)\n",
        13,
    )


def test_a_wrong_tree_is_seen():
    entries = tree_entries(blocks(SAMPLE, "text")[0].text)
    assert entries == [("Makefile",), ("src/",), ("src/", "a.py"), ("docs/",)]
    right = ["Makefile", ".gitignore", "src/__init__.py", "src/a.py", "docs/x.md"]
    assert tree_differences(entries, right) == []
    wrong = ["src/a.py", "src/b.py", "docs/x.md", "docs/y/z.md", "LICENSE"]
    assert tree_differences(entries, wrong) == [
        "listed but not there: Makefile",
        "there but not listed: LICENSE",
        "there but not listed: src/b.py",
    ]
