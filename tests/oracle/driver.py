"""Spreads cases over processes, survives their deaths, repeats alarms, and sums up."""

from __future__ import annotations

import collections
import json
import os
import queue
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from .judge import CONDITIONED, is_alarm
from .worker import AGAIN

ROOT = Path(__file__).parents[2]
SHARES = {
    "table": 0.4,
    "dgl": 0.1,
    "histories": 0.2,
    "captures": 0.05,
    "messages": 0.15,
    "metagraphs": 0.1,
    "scripts": 0.1,
    "programs": 0.1,
}
SILENCE = (
    240  # seconds without a line after which a process hangs; the emulation may compile in one case
)
KEPT = 200  # alarms


@dataclass
class Task:
    """The cases ``first``, ``first + step``, ... of a part on a backend, for some seconds."""

    part: str
    backend: str
    first: int
    step: int
    seconds: float
    cases: int = 1 << 40
    only: str = ""
    mode: str = ""

    def command(self) -> list[str]:
        values = {
            "part": self.part,
            "backend": self.backend,
            "first": self.first,
            "step": self.step,
            "seconds": self.seconds,
            "cases": self.cases,
            "only": self.only,
            "mode": self.mode,
        }
        return [
            sys.executable,
            "-m",
            "tests.oracle",
            "worker",
            *(f"--{k}={v}" for k, v in values.items()),
        ]


@dataclass
class Summary:
    """Counts by part and backend, alarms, and cases that are none for their inputs' sake."""

    counts: dict = field(default_factory=lambda: collections.defaultdict(collections.Counter))
    alarms: list = field(default_factory=list)
    conditioned: list = field(default_factory=list)  # lines that repeat ill-conditioned cases
    lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self, task: Task, **amounts: float) -> None:
        with self.lock:
            self.counts[f"{task.part} {task.backend}"].update(amounts)

    def alarm(self, task: Task, seed: int, what: str, text: str, replay: str) -> None:
        with self.lock:
            self.counts[f"{task.part} {task.backend}"]["alarms"] += 1
            if len(self.alarms) < KEPT:
                line = reproducer(task, seed, what)
                self.alarms.append({"part": task.part, "backend": task.backend, "seed": seed,
                                    "what": what, "text": text, "reproduce": line,
                                    "replay": replay})
                print(f"ALARM {task.part} {what}: {text}\n  {line}", flush=True)

    def note(self, task: Task, seed: int, what: str, text: str) -> None:
        """A case whose error is that of its inputs' rounding."""
        with self.lock:
            self.counts[f"{task.part} {task.backend}"]["conditioned"] += 1
            line = reproducer(task, seed, what)
            self.conditioned.append({"reproduce": line, "text": text})
            print(f"{task.part} {what}: {text}\n  {line}", flush=True)

    def as_dict(self) -> dict:
        """For a file: amounts by part and backend, and the alarms."""
        counts = {
            key: {k: round(v, 1) for k, v in amounts.items()}
            for key, amounts in sorted(self.counts.items())
        }
        return {"counts": counts, "alarms": self.alarms, "conditioned": self.conditioned}


def reproducer(task: Task, seed: int, what: str) -> str:
    """The command that repeats a case."""
    name, _, mode = what.partition(" --mode ")
    line = f"python -m tests.oracle {task.part}" + (f" {name!r}" if name
                                                    and task.part in ("table", "dgl") else "")
    return (line + f" --seed {seed}" + (f" --mode {mode}" if mode else "" if " '" in line
                                        else " --one") + f" --backend {task.backend}"
            + (f" --scale {scale}" if (scale := os.environ.get("GNNACCEL_ORACLE_SCALE")) else ""))


def environment() -> dict:
    return {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
        "PYTHONHASHSEED": "0",
    }


def follow(task: Task, summary: Summary) -> None:
    """Run a task to its end, in a new process each time one dies or can go no further."""
    end = time.monotonic() + task.seconds
    deaths, started = 0, task.first
    while task.cases > 0 and deaths < 20:
        task.seconds = max(1.0, end - time.monotonic())
        status, seed, done = _process(task, summary, started)
        task.cases -= done
        if status == 0 or time.monotonic() > end:
            return
        deaths += status != AGAIN
        task.first = seed + task.step


def _process(task: Task, summary: Summary, started: int) -> tuple[int, int, int]:
    """One process of a task: its exit status, its last case, and the number of cases."""
    process = subprocess.Popen(task.command(), cwd=ROOT, env=environment(), text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, errors="replace")
    lines: queue.Queue = queue.Queue()
    tail: collections.deque = collections.deque(maxlen=12)
    readers = [
        threading.Thread(target=_read, args=(process.stdout, lines.put), daemon=True),
        threading.Thread(target=_read, args=(process.stderr, tail.append), daemon=True),
    ]
    for reader in readers:
        reader.start()
    seed, done, running, hangs = task.first - task.step, 0, False, False
    while True:
        try:
            line = lines.get(timeout=SILENCE)
        except queue.Empty:
            process.kill()
            hangs = True
            break
        if line is None:
            break
        if not line.startswith("{"):
            continue
        said = json.loads(line)
        if "begin" in said:
            seed, running = said["begin"], True
        elif "end" in said:
            running, done = False, done + 1
            replay = f"--replay {started}:{seed + 1}:{task.step}"
            _take(task, summary, said,
                  f"python -m tests.oracle {task.part} --backend {task.backend} {replay}")
        else:
            summary.count(task, skipped=1)
    status = process.wait()
    readers[1].join(5)
    if running or hangs or status not in (0, AGAIN):
        why = ("hangs" if hangs
               else f"the process ended with status {status}: {' '.join(tail)[-400:]}")
        summary.alarm(task, seed, _drawn(task, seed), why, "")
        status = status or 1
        done += running
    return status, seed, done


def _drawn(task: Task, seed: int) -> str:
    """What a case that did not come to its end was about."""
    if task.part != "table" or task.only and task.mode:
        return task.only
    ask = f"drawn({seed}, {task.only!r})"
    code = f"from tests.oracle.table import drawn; print(' --mode '.join({ask}))"
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment(),
                           capture_output=True, text=True)
    return found.stdout.strip().splitlines()[-1] if found.stdout.strip() else task.only


def _read(stream, put) -> None:
    for line in stream:
        put(line.rstrip("\n"))
    put(None) if getattr(put, "__self__", None).__class__ is queue.Queue else None


def _take(task: Task, summary: Summary, said: dict, replay: str) -> None:
    wrong = said["wrong"]
    summary.count(task, cases=1, checks=said["checks"], seconds=said["seconds"],
                  refused=wrong == "refused")
    if str(wrong).startswith(CONDITIONED):
        summary.note(task, said["end"], said["what"], wrong)
    elif is_alarm(wrong):
        summary.alarm(task, said["end"], said["what"], wrong, replay)


def run(tasks: list[Task], processes: int) -> Summary:
    """Run all tasks, as many at a time as there are processes."""
    summary, waiting = Summary(), queue.Queue()
    for task in tasks:
        waiting.put(task)

    def keep_working() -> None:
        while True:
            try:
                task = waiting.get_nowait()
            except queue.Empty:
                return
            follow(task, summary)

    threads = [threading.Thread(target=keep_working) for _ in range(processes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return summary


def reproduce(summary: Summary, processes: int) -> None:
    """Says of each alarm whether it comes again alone, in a fresh process.

    If it does not, it hangs on the cases before it.
    """
    chosen = summary.alarms[:24]
    waiting: queue.Queue = queue.Queue()
    for alarm in chosen:
        waiting.put(alarm)

    def repeat() -> None:
        while True:
            try:
                alarm = waiting.get_nowait()
            except queue.Empty:
                return
            name, _, mode = alarm["what"].partition(" --mode ")
            only = name if alarm["part"] in ("table", "dgl") else ""
            task = Task(alarm["part"], alarm["backend"], alarm["seed"], 1, 200, 1, only, mode)
            try:
                done = subprocess.run(task.command(), cwd=ROOT, env=environment(),
                                      capture_output=True, text=True, timeout=SILENCE)
            except subprocess.TimeoutExpired:
                continue
            last = done.stdout.strip().splitlines()[-1:] or [""]
            said = json.loads(last[0]) if last[0].startswith("{") else {}
            alarm["alone"] = done.returncode not in (0, AGAIN) or is_alarm(said.get("wrong"))

    threads = [threading.Thread(target=repeat) for _ in range(max(1, min(processes, len(chosen))))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
