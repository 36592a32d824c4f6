"""docs/metrics.md explains every metric that a run writes."""

import re

from tests.support.metric_names import (
    PLACEHOLDER,
    documented_metrics,
    undocumented_metrics,
    written_metrics,
)


def test_metrics_page_explains_every_metric_of_the_code() -> None:
    written = written_metrics()
    # Names from each kind of place in the code.
    places = {"reward", "rollout/staleness_max", "seconds/…", "ratio/mean", "mismatch/kl_k3"}
    assert places <= written

    missing = []
    for name in written:
        pattern = re.escape(name).replace(PLACEHOLDER, ".+")
        # Values of a placeholder stand on the page as names, or as a word in capitals.
        if not any(re.fullmatch(pattern, documented) for documented in documented_metrics()):
            missing += undocumented_metrics([name])
    assert missing == []


def test_name_that_the_page_does_not_explain_is_found() -> None:
    names = ["step", "seconds/update", "correction/dropped_fraction/veto", "seconds", "new/metric"]
    assert undocumented_metrics(names) == ["new/metric", "seconds"]
