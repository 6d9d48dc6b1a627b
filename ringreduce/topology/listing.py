"""Finds the matrix of `nvidia-smi topo -m` (and `-mp`) in a text, as people post it.

A row is a label and one cell per column: X, NV# (bonded NVLinks), or a link class; then come affinities.  What is
around the matrix is skipped: prompts, quotes, legends, colours, a whole bug report.  Rows are believed more than the
header, which often lost its indent, its blanks or itself; in a table with bars it says which column is where.

The rows of the GPUs must be whole: one each, equally long, symmetric, X on the diagonal.  Anything else was cut off or
altered on the way, and raises TopologyError with line and column: no plan is made on half a matrix.
"""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from ringreduce.common.failures import TopologyError
from ringreduce.topology.classes import LinkClass

HOW_TO = "run `nvidia-smi topo -m` and save all that it prints"

LONGEST_LINE = 20_000
"""Longer lines are no rows: with 72 GPUs and as many NICs one has about 1,200 characters."""

HEADER_LINES = 8
"""The header is looked for so many lines above the first row."""

MOST_TABLES = 1000
"""So many lines are looked at for the header of a table."""

MOST_WRAPS = 20
"""A terminal broke a row into so many lines more."""

MOST_NICS = 400
"""Rows of NICs are looked for in so many lines below the GPUs'."""

CLASSES = {
    "PIX": LinkClass.PIX,
    "PSB": LinkClass.PIX,  # the switch on a board with two GPUs
    "PXB": LinkClass.PXB,
    "PHB": LinkClass.PHB,
    "NODE": LinkClass.NODE,
    "SYS": LinkClass.SYS,
    "SOC": LinkClass.SYS,  # how drivers spelled it before 2018
}

_CELL = rf"(?:X|NV\d{{1,3}}|{'|'.join(CLASSES)})"
_APART = r"[\s|,;]"
_COLOUR = re.compile(r"(?:\x1b|\\x1b|\\033|\\e|\\u001b|\^\[)?\[[0-9;]{0,12}m|\x1b\[[0-9;?]*[A-Za-z]")
_BLANKS = str.maketrans({**dict.fromkeys("`*\"'\xa0\u200b\ufeff", " "), **dict.fromkeys("│┃║", "|")})
_GPU = re.compile(r"GPU(\d{1,4})(?!\d)")
_ROW = re.compile(rf"(?<![\w.-])(?P<label>GPU\d{{1,4}}){_APART}+(?={_CELL}+(?:{_APART}|$))")
_CELLS = re.compile(rf"{_APART}*(?P<cells>{_CELL}+)(?={_APART}|$)")
_ACCESS = re.compile(rf"GPU\d+{_APART}+(?:X{_APART}+)?(?:OK|NS|CNS|GNS|TNS|DR|U)(?={_APART}|$)")
_LABEL = re.compile(r"GPU\d+|NIC\d+|mlx\d+_(?:[a-z]+_)?\d+|(?:(?!GPU\d|NIC\d|mlx\d)[\w.:+-])+")
_CPU_AFFINITY = r"CPU\s?Affinity"
_NUMA_AFFINITY = r"NUMA(?:\s?(?:Affinity|Node))?"
_AFFINITY = re.compile(rf"{_CPU_AFFINITY}|GPU\s?NUMA\s?ID|{_NUMA_AFFINITY}", re.IGNORECASE)
_RULE = re.compile(r"[-=+|:\s]*")
_NIC_ROW = re.compile(
    rf"(?<![\w.-])(?P<label>(?!GPU|N?V\d{{1,3}}{_APART})[A-Za-z][\w.:+-]*\d[\w.:+-]*){_APART}+(?={_CELL}+(?:{_APART}|$))"
)
_FOREIGN = re.compile(r"[A-Z]{2,8}\d{0,3}(?![^\s|])")
_WRAPPED = re.compile(r"[A-Z0-9/,\-\s|]+")
_NIC_LEGEND = re.compile(r"(NIC\d+)\s*:\s*([A-Za-z][\w.:+-]*)")


@dataclass(frozen=True)
class Cell:
    """What stands in a row, and the line and column (from 1) where it begins."""

    text: str
    line: int
    column: int


@dataclass(frozen=True)
class Row:
    """A device's label, its cells, and the texts of its affinity columns."""

    label: Cell
    cells: tuple[Cell, ...]
    cpu_affinity: str = ""
    numa_affinity: str = ""


@dataclass(frozen=True)
class Listing:
    """A matrix: `gpus[i].cells[j]` is how the i-th GPU meets the device that `columns[j]` names.

    `nics` are rows of other devices, as far as they are there.  `names` has the NICs' own names by label.
    """

    gpus: tuple[Row, ...]
    columns: tuple[str, ...]
    nics: tuple[Row, ...]
    names: dict[str, str]
    assumed: tuple[str, ...]

    @property
    def others(self) -> list[str]:
        """The labels of the devices that are no GPUs: of columns, and of whole rows whose columns were lost."""
        whole = (row for row in self.nics if [cell.text in CLASSES for cell in row.cells] == [True] * len(self.columns))
        labels = dict.fromkeys([*self.columns, *(row.label.text for row in whole)])
        return [label for label in labels if not _GPU.fullmatch(label)]


def find_listing(text: str, where: str) -> Listing:
    """The first matrix in `text`; `where` names the text in errors."""
    lines = [line and _plain(line) for line in re.split(r"\r\n|\n|\r", text)]
    table, start = _table(lines), _first_row(lines)
    if table and (start is None or table.gpus[0].label.line <= start + 1):
        listing = table
    else:
        listing = _rows(lines, start, where)
    _check(listing, where)
    names = {label: name for label, name in _NIC_LEGEND.findall(text) if label in listing.others}
    return replace(listing, names=names if len(set(names.values())) == len(names) else {})


def _plain(line: str) -> str:
    """The line with blanks for colours and marks, every character where it was; nothing if it is too long for a row."""
    if len(line) > LONGEST_LINE:
        return ""
    if "[" in line:
        line = _COLOUR.sub(lambda colour: " " * len(colour[0]), line)
    return line.translate(_BLANKS)


# Tables with bars (Markdown, or drawn): the header says which column is where.


def _table(lines: Sequence[str]) -> Listing | None:
    """The first table with GPUs for columns and for rows, if there is one: of link classes, not of who reaches whom."""
    candidates = (at for at, line in enumerate(lines) if "|" in line and "GPU" in line)
    for at in islice(candidates, MOST_TABLES):
        header = _between_bars(lines[at], at + 1)
        gpus = [place for place, cell in enumerate(header) if _GPU.fullmatch(cell.text)]
        if gpus and not any(re.fullmatch(_CELL, cell.text) for cell in header):
            listing = _table_below(lines, at + 1, header, gpus)
            if listing.gpus and not any(_ACCESS.search(lines[row.label.line - 1]) for row in listing.gpus):
                return listing
    return None


def _table_below(lines: Sequence[str], start: int, header: Sequence[Cell], gpus: Sequence[int]) -> Listing:
    devices = [place for place, cell in enumerate(header) if re.search(r"\d", cell.text)]
    headings = {place: cell.text for place, cell in enumerate(header) if _AFFINITY.fullmatch(cell.text)}
    rows: list[Row] = []
    places: list[int] = []
    for number in range(start + 1, len(lines) + 1):
        line = lines[number - 1]
        if "|" not in line:
            break
        cells = _between_bars(line, number)
        if _RULE.fullmatch(line):
            continue
        within = enumerate(cells[: len(header)])
        labels = [place for place, cell in within if _GPU.fullmatch(cell.text) and place not in gpus]
        if not rows and not labels:
            break
        if not rows:
            places = [labels[0], *gpus, *(place for place in devices if place not in (*gpus, *labels))]
        end = Cell("", number, len(line) + 1)
        cells += [end] * (len(header) - len(cells))
        affinity = _by_heading((heading, cells[place].text) for place, heading in headings.items())
        label, *classes = (cells[place] for place in places)
        classes += [cell for cell in cells[len(header) :] if cell.text]
        rows.append(Row(label, tuple(classes), *affinity))
    return _listing([header[place].text for place in places[1:]], rows)


def _between_bars(line: str, number: int) -> list[Cell]:
    cells, begin = [], 0
    for part in line.split("|"):
        cells.append(Cell(part.strip(), number, begin + len(part) - len(part.lstrip()) + 1))
        begin += len(part) + 1
    return cells


def _listing(columns: Sequence[str], rows: Sequence[Row], assumed: Sequence[str] = ()) -> Listing:
    gpus = tuple(row for row in rows if _GPU.fullmatch(row.label.text))
    nics = tuple(row for row in rows if not _GPU.fullmatch(row.label.text))
    return Listing(gpus, tuple(columns), nics, {}, tuple(assumed))


# Rows as nvidia-smi prints them: cells apart by tabs or blanks.


@dataclass(frozen=True)
class _Header:
    """The labels of the columns, and the affinity columns with the place (from 0) where each begins."""

    labels: tuple[str, ...]
    affinity: tuple[tuple[str, int], ...]


def _rows(lines: Sequence[str], start: int | None, where: str) -> Listing:
    if start is None:
        raise _no_matrix(lines, where)
    header = _header_above(lines, start)
    gpus: dict[str, Row] = {}
    assumed = []
    after = start
    for at in range(start, len(lines)):
        if "GPU" not in lines[at] or not (found := _ROW.search(lines[at])) or _ACCESS.search(lines[at]):
            continue
        if found["label"] in gpus:
            assumed.append(f"Another matrix begins in line {at + 1}; only the first was read.")
            break
        row = gpus[found["label"]] = _row(lines, at, found, header)
        after = at + 1
        if sum(cell.text == "X" for cell in row.cells) != 1:
            break  # what follows cannot mend it
    nics = _nic_rows(lines, after, header)
    columns = _columns(list(gpus.values()), nics, header, where)
    return _listing(columns, [*gpus.values(), *nics], assumed)


def _first_row(lines: Sequence[str]) -> int | None:
    """The place (from 0) of the first row of link classes."""
    rows = (at for at, line in enumerate(lines) if "GPU" in line and not _ACCESS.search(line) and _ROW.search(line))
    return next(rows, None)


def _no_matrix(lines: Sequence[str], where: str) -> TopologyError:
    for at, line in enumerate(lines):
        if "GPU" in line and (found := _ACCESS.search(line)):
            what = f"this is `nvidia-smi topo -p2p`, which says who may reach whom, not over which links; {HOW_TO}"
            return _error(where, Cell("", at + 1, found.start() + 1), what)
    for at, line in enumerate(lines):
        if len(named := list(_GPU.finditer(line))) > 1:
            what = f"GPUs are named, but no row such as `GPU0 X NV1 SYS` follows; {HOW_TO}"
            return _error(where, Cell("", at + 1, named[0].start() + 1), what)
    first = next((at for at, line in enumerate(lines) if line.strip()), 0)
    return _error(where, Cell("", first + 1, 1), f"no matrix of link classes is in it; {HOW_TO}")


def _header_above(lines: Sequence[str], start: int) -> _Header | None:
    """The header, if there is one above the first row: labels and nothing else, perhaps wrapped over several lines."""
    wrapped = ""
    for line in reversed(lines[max(0, start - HEADER_LINES) : start]):
        found = re.search(r"GPU\d", line)
        text = line[found.start() :] if found else line
        labels = _LABEL.findall(_AFFINITY.sub(" ", f"{text} {wrapped}"))
        if not all(re.search(r"\d", label) for label in labels) and not _RULE.fullmatch(text):
            return None
        if found:
            return _Header(tuple(labels), tuple((match[0], match.start()) for match in _AFFINITY.finditer(line)))
        wrapped = f"{text} {wrapped}" if not _RULE.fullmatch(text) else wrapped
    return None


def _row(lines: Sequence[str], at: int, label: re.Match[str], header: _Header | None) -> Row:
    """The row in line `at`: cells, glued ones apart, until something is not a class; then affinities."""
    line, starts = _unwrapped(lines, at)
    place = label.end("label")
    cells = []
    while found := _CELLS.match(line, place):
        for cell in re.finditer(_CELL, found["cells"]):
            cells.append(_located(cell[0], found.start("cells") + cell.start(), starts))
        place = found.end()
    begins = _located(label["label"], label.start("label"), starts)
    if line[place : starts[-1][0]].strip():  # affinities are broken, perhaps within a number
        return Row(begins, tuple(cells))
    return Row(begins, tuple(cells), *_affinities(line, place, header))


def _unwrapped(lines: Sequence[str], at: int) -> tuple[str, list[tuple[int, int]]]:
    """The row with the lines that a terminal broke it into, and at which place (from 0) each line (from 1) begins."""
    text, starts = lines[at], [(0, at + 1)]
    for number in range(at + 2, min(at + 2 + MOST_WRAPS, len(lines) + 1)):
        line = lines[number - 1]
        if not _WRAPPED.fullmatch(line) or not line.strip() or _GPU.search(line) or _NIC_ROW.search(line):
            break
        left, right = re.split(r"\s", text)[-1], re.split(r"\s", line, maxsplit=1)[0]
        if re.fullmatch(_CELL + "+", left) and not re.fullmatch(r"\d{1,2}", right):
            text += " "
        starts.append((len(text), number))
        text += line
    return text, starts


def _located(text: str, place: int, starts: Sequence[tuple[int, int]]) -> Cell:
    begin, number = next(start for start in reversed(starts) if start[0] <= place)
    return Cell(text, number, place - begin + 1)


def _affinities(line: str, place: int, header: _Header | None) -> tuple[str, str]:
    """The texts for CPU and NUMA affinity in what follows the cells.

    An empty cell shows only as two tabs, or as a gap under the header; NUMA affinity may stand one tab late.
    """
    rest = line[place:]
    if "\t" in rest:
        before, *texts = [text.strip() for text in rest.split("\t")]
        cpu, *others = [before, *texts] if before else texts
        return cpu, next((text for text in others if text), "")
    found = list(re.finditer(r"\S+", rest))
    columns = header.affinity if header else ()
    if len(found) >= len(columns):
        texts = [match[0] for match in found]
        return (*texts, "", "")[0], (*texts, "", "")[1]
    return _by_heading(
        (min(columns, key=lambda column: abs(column[1] - place - match.start()))[0], match[0]) for match in found
    )


def _by_heading(texts: Iterable[tuple[str, str]]) -> tuple[str, str]:
    """The texts for CPU and NUMA affinity, of those that stand under the headings."""
    cpu = numa = ""
    for heading, text in texts:
        if re.fullmatch(_CPU_AFFINITY, heading, re.IGNORECASE):
            cpu = text
        elif re.fullmatch(_NUMA_AFFINITY, heading, re.IGNORECASE):
            numa = text
    return cpu, numa


def _nic_rows(lines: Sequence[str], start: int, header: _Header | None) -> list[Row]:
    """The rows below the GPUs', up to the legend."""
    rows: list[Row] = []
    for at in range(start, min(len(lines), start + MOST_NICS)):
        if "=" in lines[at] or _ROW.search(lines[at]):
            break
        found = _NIC_ROW.search(lines[at])
        if found and not any(row.label.text == found["label"] for row in rows):
            rows.append(_row(lines, at, found, header))
    return rows


def _columns(gpus: Sequence[Row], nics: Sequence[Row], header: _Header | None, where: str) -> list[str]:
    """The labels of the columns: the header's if the rows have as many cells, else those of the rows."""
    widths = {len(row.cells) for row in gpus}
    width = max(widths)
    own = [row.label.text for row in gpus]
    if header:
        missing = any(_GPU.fullmatch(label) and label not in own for label in header.labels)
        if len(header.labels) in widths or len(widths) > 1 or missing:
            return list(header.labels)
    others = [row.label.text for row in nics]
    if not header and not others and (len(own) < width or width == 1):
        what = f"no header that can be read and no row says whether GPUs follow {own[-1]}{_WHOLE}"
        raise _error(where, _end(gpus[-1]), what)
    return [*own, *others, *(f"NIC{at}" for at in range(len(others), width - len(own)))][:width]


# What makes a matrix whole.


def _check(listing: Listing, where: str) -> None:
    """Raises TopologyError for the first thing that is missing, or that contradicts something else."""
    gpus: dict[str, Row] = {}
    for row in listing.gpus:
        if gpus.setdefault(row.label.text, row) is not row:
            raise _error(where, row.label, f"this is a second row of {row.label.text}; keep one matrix only")
    for row in listing.gpus:
        if row.label.text not in listing.columns:
            raise _error(where, row.label, f"{row.label.text} has a row but no column{_WHOLE}")
        if len(row.cells) != (width := len(listing.columns)):
            text = row.cpu_affinity or row.numa_affinity
            after, why = f", then {text!r:.40}" if text else "", _WHOLE
            if _FOREIGN.match(text):
                why = f", no link class of `nvidia-smi`: the text was altered, or another tool printed it; {HOW_TO}"
            what = f"{row.label.text} has {len(row.cells)} cells for {width} columns{after}{why}"
            raise _error(where, _end(row), what)
        for label, cell in zip(listing.columns, row.cells, strict=True):
            _check_cell(where, row.label.text, label, cell)
    last = listing.gpus[-1]
    for label, count in Counter(listing.columns).items():
        if _GPU.fullmatch(label) and label not in gpus:
            raise _error(where, _end(last), f"{label} has a column but no row{_WHOLE}")
        if count > 1:
            raise _error(where, last.label, f"{count} columns are called {label}{_WHOLE}")
    seen = {
        (row.label.text, label): cell
        for row in (*listing.gpus, *listing.nics)
        for label, cell in zip(listing.columns, row.cells, strict=False)
    }
    for (one, other), cell in seen.items():
        back = seen.get((other, one), cell)
        if CLASSES.get(back.text, back.text) != CLASSES.get(cell.text, cell.text):
            raise _error(
                where,
                cell,
                f"{one} to {other} is {cell.text}, but {other} to {one} is {back.text} "
                f"(line {back.line}, column {back.column}); {HOW_TO}",
            )


_WHOLE = f": the text was cut off or altered; {HOW_TO}"


def _check_cell(where: str, row: str, column: str, cell: Cell) -> None:
    if not re.fullmatch(_CELL, cell.text):
        raise _error(where, cell, f"{row} to {column} is {cell.text!r}, which is no link class{_WHOLE}")
    if (cell.text == "X") != (row == column):
        raise _error(where, cell, f"{row} to {column} is {cell.text}; only from itself to itself is X{_WHOLE}")
    if cell.text.startswith("NV") and not _GPU.fullmatch(column):
        raise _error(where, cell, f"{row} has NVLinks to a device that has no row of its own, as GPUs do{_WHOLE}")
    if cell.text.startswith("NV") and int(cell.text[2:]) == 0:
        raise _error(where, cell, f"{row} to {column} is {cell.text}: NVLink without a link{_WHOLE}")


def _end(row: Row) -> Cell:
    """The place behind a row's last cell."""
    last = row.cells[-1] if row.cells else row.label
    return Cell("", last.line, last.column + len(last.text))


def _error(where: str, at: Cell, what: str) -> TopologyError:
    return TopologyError(f"{where}: line {at.line}, column {at.column}: {what}")
