"""Row 37: KV that is saved on disk, in random traces of conversations with faults of disk and process.

The model is small and random, so that a trace takes seconds: what is compared is every token.
"""

from __future__ import annotations

from tests.chaos.report import Form, Report, row
from tests.support.checkpoints import make_checkpoint
from tests.support.kv_traces import Trace, slow_arithmetic


@row(
    "37",
    "KV on disk is evicted, forgotten, flipped, cut, found after restarts and after kills in mid-write",
    "every token is that of an engine without it; no block leaks",
    short=False,
)
async def kv_traces(form: Form, report: Report) -> None:
    """Traces, each on a folder of its own."""
    draw, num = form.draw("saved kv"), form.of(4, 500)
    model = make_checkpoint("qwen3", form.folder / "model")
    restored = restarts = kills = damaged = 0
    with slow_arithmetic():
        for n in range(num):
            trace = Trace(model, form.folder / f"kv{n}", draw, deterministic=n % 2 == 1)
            report.breaks(f"trace {n}: {line}" for line in await trace.run())
            restored += trace.num_restored
            restarts += trace.num_restarts
            kills += trace.num_kills
            damaged += trace.num_damaged
            if n % 20 == 19:
                report.so_far(f"{n + 1} traces, {restored} tokens restored")
    report.holds(restored > 0, "nothing was ever restored")
    report.figure(
        f"{num} traces, half of them deterministic: {restored} tokens restored, {restarts} restarts, "
        f"{kills} of them on what a kill had left, {damaged} files damaged; every token as without"
    )
