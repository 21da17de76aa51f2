"""The command line: which mutants, how many at a time, where the outcomes go."""

from __future__ import annotations

import argparse
import json
import re
import signal
import sys
import time
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.arguments import from_one

from .explained import EXPLAINED
from .generate import mutants_of
from .judge import BROKEN, KILLED, SURVIVED, TIMED_OUT, UNFINISHED, Judge, Outcome
from .known import KNOWN
from .patch import Mutant
from .which_tests import TESTS, tests_for

FATES = (KILLED, TIMED_OUT, "explained", SURVIVED, UNFINISHED, BROKEN)


def all_mutants() -> list[Mutant]:
    """By hand first, then those of each module in the order of the table."""
    return [*KNOWN, *(mutant for file in TESTS for mutant in mutants_of(file))]


def choose(mutants: Sequence[Mutant], only: str, one_in: int) -> list[Mutant]:
    """Those whose name matches, and of the generated ones every n-th by a hash of the name."""
    return [
        mutant
        for mutant in mutants
        if re.search(only, mutant.name)
        and (mutant.why or zlib.crc32(mutant.name.encode()) % one_in == 0)
    ]


@dataclass(frozen=True)
class Effort:
    """How much is done for each mutant."""

    limit: float  # seconds for one test
    total: float  # seconds for a mutant
    first: int  # entries of the list of tests


def sooner(mutant: Mutant, outcomes: Mapping[str, Outcome]) -> list[str]:
    """Tests that noticed other mutants of the same module, the most successful ones first."""
    module = mutant.name.split(":")[0] + ":"
    noticed = (
        outcome.by
        for name, outcome in outcomes.items()
        if outcome.fate == KILLED and name.startswith(module)
    )
    return [name for name, _ in Counter(noticed).most_common()]


def run(
    mutants: Sequence[Mutant], jobs: int, effort: Effort, keep: Path | None
) -> dict[str, Outcome]:
    """Tries each mutant, `jobs` at a time."""
    known, outcomes = read(keep), dict[str, Outcome]()
    judges = [Judge() for _ in range(jobs)]
    idle, busy, left = list(judges), dict[Judge, Mutant](), list(mutants)
    try:
        while left or busy:
            while left and idle:
                judge, mutant = idle.pop(), left.pop(0)
                before = [] if mutant.seen_by else sooner(mutant, known | outcomes)
                tests = tests_for(mutant, effort.first)
                judge.begin(mutant, tests, effort.limit, total=effort.total, sooner=before)
                busy[judge] = mutant
            time.sleep(0.05)
            for judge, mutant in list(busy.items()):
                outcome = judge.poll()
                if outcome is None:
                    continue
                outcomes[mutant.name] = outcome
                del busy[judge]
                idle.append(judge)
                report(outcome, mutant.name)
                if keep is not None:
                    write(keep, outcomes)
    finally:
        for judge in judges:
            judge.close()
    return outcomes


def report(outcome: Outcome, name: str) -> None:
    """One line, at once."""
    print(f"{outcome.fate:12} {outcome.seconds:5.0f} s  {name}  [{outcome.by}]", flush=True)


def write(path: Path, outcomes: dict[str, Outcome]) -> None:
    """Outcomes as JSON, added to those that the file has of other mutants."""
    known = {name: vars(outcome) for name, outcome in (read(path) | outcomes).items()}
    path.write_text(json.dumps(known, indent=1), encoding="utf-8")


def read(path: Path | None) -> dict[str, Outcome]:
    """What `write` wrote, or nothing."""
    if path is None or not path.exists():
        return {}
    outcomes = json.loads(path.read_text(encoding="utf-8"))
    return {name: Outcome(**outcome) for name, outcome in outcomes.items()}


def fate_of(name: str, fate: str) -> str:
    """The fate, or "explained" for a survivor that has its reason."""
    return "explained" if fate == SURVIVED and name in EXPLAINED else fate


def score(outcomes: dict[str, Outcome]) -> str:
    """A table of fates, module by module."""
    rows: dict[str, Counter[str]] = {}
    for name, outcome in outcomes.items():
        rows.setdefault(name.split(":")[0], Counter())[fate_of(name, outcome.fate)] += 1
    rows["all"] = sum(rows.values(), Counter())
    lines = [f"{'module':28}" + "".join(f"{fate:>14}" for fate in FATES)]
    lines += [
        f"{module:28}" + "".join(f"{fate_count[fate]:14}" for fate in FATES)
        for module, fate_count in rows.items()
    ]
    return "\n".join(lines)


def all_noticed(outcomes: dict[str, Outcome]) -> bool:
    """Whether each was noticed, or has its reason; one that is not finished was not noticed."""
    fates = {fate_of(name, outcome.fate) for name, outcome in outcomes.items()}
    return not fates & {SURVIVED, UNFINISHED, BROKEN}


def _seconds(text: str) -> float:
    number = float(text)
    if not number > 0:  # nor NaN
        raise argparse.ArgumentTypeError(f"must be above 0, got {text}")
    return number


def _pattern(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no regular expression: {error}") from None
    return text


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__)
    parser.add_argument(
        "--only", type=_pattern, default="", help="regular expression for names, found anywhere"
    )
    parser.add_argument("--one-in", type=from_one, default=1, help="every n-th generated mutant")
    parser.add_argument("--jobs", type=from_one, default=1, help="mutants at a time")
    parser.add_argument(
        "--limit", type=_seconds, default=300, help="s for a test; 300, then it hangs"
    )
    parser.add_argument("--total", type=_seconds, default=1e9, help="s for a mutant; no limit")
    parser.add_argument("--first", type=from_one, default=99, help="entries of the list of tests")
    parser.add_argument("--json", type=Path, help="keep outcomes in this file, as they come")
    parser.add_argument("--skip-done", action="store_true", help="leave out what --json has")
    parser.add_argument("--again", choices=FATES, help="only those to which --json gives this")
    parser.add_argument("--unexplained", action="store_true", help="leave out what is explained")
    parser.add_argument("--score", action="store_true", help="print the score of --json and end")
    parser.add_argument("--list", action="store_true", help="print the names and end")
    parser.add_argument("--baseline", action="store_true", help="run each test list unchanged")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs mutants and prints the score; exit status 1 where not all were noticed or explained."""
    parser = _parser()
    options = parser.parse_args(arguments)
    mutants = choose(all_mutants(), options.only, options.one_in)
    if not mutants:
        parser.error(f"no mutant matches --only {options.only!r} with --one-in {options.one_in}")
    done = read(options.json)
    if options.skip_done:
        mutants = [mutant for mutant in mutants if mutant.name not in done]
    if options.unexplained:
        mutants = [mutant for mutant in mutants if mutant.name not in EXPLAINED]
    if options.again:
        fates = {name: fate_of(name, outcome.fate) for name, outcome in done.items()}
        mutants = [mutant for mutant in mutants if fates.get(mutant.name) == options.again]
    if options.score:
        print(score(done))
        return
    if options.list:
        print("\n".join(mutant.name for mutant in mutants))
        return
    if options.baseline:
        baseline({mutant.file for mutant in mutants}, options.limit)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the copies are removed then, too
    begun = time.monotonic()
    effort = Effort(options.limit, options.total, options.first)
    outcomes = run(mutants, options.jobs, effort, options.json)
    print(score(outcomes))
    print(f"{len(outcomes)} mutants in {time.monotonic() - begun:.0f} s")
    raise SystemExit(not all_noticed(outcomes))


def baseline(files: set[str], limit: float) -> None:
    """Each list of tests must pass on the package as it is."""
    seen = []
    with Judge() as judge:
        for file in TESTS:
            if file not in files or TESTS[file] in seen:
                continue
            seen.append(TESTS[file])
            judge.begin(None, TESTS[file], limit)
            while (outcome := judge.poll()) is None:
                time.sleep(0.05)
            report(outcome, file)
