"""Makes one page of metrics of those of several processes at one port.

What each process counts for itself gets the label `process`, so that a process which is started again begins
its own counters anew and no sum of others. What they all tell of the engines that they share stands there
once, as the asked process knows it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

SHARED = (
    *("antiphon_engine_", "antiphon_kv_", "antiphon_gpu_", "antiphon_pooling_", "antiphon_speech_"),
    *("antiphon_model_load", "antiphon_model_unload", "antiphon_model_memory_", "antiphon_model_crashes"),
)
"""How the names of metrics begin that are those of engines."""


class _Families(Collector):
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = tuple(families)

    def collect(self) -> Iterable[Metric]:
        """Every family."""
        return self._families


def page_of_all(pages: Mapping[str, bytes], own: str) -> Collector:
    """The families of all pages, by the names of their processes; `own` is the asked one's."""
    families: dict[str, Metric] = {}
    for process, page in pages.items():
        for family in text_string_to_metric_families(page.decode()):
            shared = family.name.startswith(SHARED)
            if shared and process != own:
                continue
            known = families.get(family.name)
            if known is None:
                known = families[family.name] = Metric(family.name, family.documentation, family.type)
            for sample in family.samples:
                labels = sample.labels if shared else {**sample.labels, "process": process}
                known.add_sample(sample.name, labels, sample.value)
    return _Families(families.values())
