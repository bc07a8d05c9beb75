"""What compute-sanitizer said: its findings, each with the call it came after, and its own count."""

import re
from dataclasses import dataclass

PREFIX = "========="
SUMMARY = re.compile(r"^(?:ERROR|RACECHECK) SUMMARY: ([\d,]+) (?:errors?|hazards? displayed)\b")
UNPRINTED = re.compile(r"SUMMARY: .* not printed")
MADE = re.compile(r"^made (\d+) calls$", re.MULTILINE)


@dataclass(frozen=True)
class Finding:
    """One message of the tool: its first line, the lines indented under it, the call it came after.

    The tool prints from a process of its own and may be late: the kernel is certain, the call is not.
    """

    head: str
    details: tuple
    call: str

    def __str__(self):
        return "\n".join((f"{self.head}   [near call {self.call}]", *self.details))


@dataclass(frozen=True)
class Report:
    """`counted` is the tool's own number of findings, None when it came to no summary."""

    findings: tuple
    counted: int | None


def read(output):
    """The Report in what a run printed, the watched program's lines and the tool's together."""
    findings, call, counted = [], "none", None
    for line in output.splitlines():
        if not line.startswith(PREFIX):
            if line.startswith("call "):
                call = line.removeprefix("call ")
            continue
        text = line.removeprefix(PREFIX)
        message = text.strip()
        summary = SUMMARY.match(message)
        if UNPRINTED.search(message) or message in ("", "COMPUTE-SANITIZER"):
            continue
        if summary:
            counted = (counted or 0) + int(summary[1].replace(",", ""))
        elif text.startswith("  ") and findings:
            findings[-1][1].append(message)
        else:
            findings.append((message, [], call))
    return Report(tuple(Finding(h, tuple(d), c) for h, d, c in findings), counted)


def calls_made(output):
    """How many calls the watched program says it made, None when it did not come to its end."""
    made = MADE.search(output)
    return int(made[1]) if made else None


def faults(output, status, expected):
    """Why a run over the ops is not clean, one line each; none when it is.

    Args:
        output: what the run printed.
        status: its exit status, None when it was stopped at its time limit.
        expected: how many calls it had to make.
    """
    report, made = read(output), calls_made(output)
    why = [f"findings: {len(report.findings)}"] if report.findings else []
    if report.counted is None:
        why.append("no summary of the tool")
    elif report.counted:
        why.append(f"the tool counts {report.counted}")
    if status is None:
        why.append("stopped at its time limit")
    elif status:
        why.append(f"exit status {status}")
    if made != expected:
        why.append(f"made {'not all' if made is None else made} of {expected} calls")
    return why


def caught(output, kind, kernel):
    """Whether a planted fault was found: a message that says `kind`, about `kernel`."""
    return any(
        kind in finding.head and any(kernel in line for line in (finding.head, *finding.details))
        for finding in read(output).findings
    )
