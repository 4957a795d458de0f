"""The shipped dashboard and alert rules: their metrics exist, and each alert fires when it should."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from idempotency import signals
from idempotency.contrib import prometheus
from idempotency.contrib.prometheus.exporter import AVAILABLE, COUNTS, EVENTS, GAUGES
from idempotency.lifecycle import Status
from idempotency.outbox.models import MessageStatus
from tests.docs.pages import DOCS, code, section, table

FILES = Path(prometheus.__file__).parent
DASHBOARD = json.loads((FILES / "dashboard.json").read_text())
RULES = {
    rule["alert"]: rule
    for group in yaml.safe_load((FILES / "alerts.yml").read_text())["groups"]
    for rule in group["rules"]
}
LABELS = {
    f"{EVENTS}_total": ("operation", "event"),
    **{f"{name}_total": () for name in COUNTS},
    **{name: (label,) if label else () for name, (_description, label) in GAUGES.items()},
}
#: The values that a label may be compared with, including the dashboard's variable.
VALUES = {
    "event": set(signals.EVENTS),
    "status": {*map(str, Status), MessageStatus.PENDING.value, MessageStatus.DEAD.value},
    "operation": {"$operation"},
}


def expressions():
    queries = {
        f"{panel['title']} {target['refId']}": target["expr"]
        for panel in DASHBOARD["panels"]
        for target in panel["targets"]
    }
    return queries | {name: rule["expr"] for name, rule in RULES.items()}


@pytest.mark.parametrize(("name", "expression"), expressions().items())
def test_the_queried_metrics_exist_with_their_labels(name, expression):
    selectors = re.findall(r"\b(idempotency_\w+)(?:\{([^}]*)\})?", expression)
    assert selectors
    for metric, matchers in selectors:
        for label, value in re.findall(r'(\w+)=~?"([^"]+)"', matchers):
            assert label in LABELS[metric]
            assert set(value.split("|")) <= VALUES[label]
    grouped = {label.strip() for labels in re.findall(r"\bby \(([^)]+)\)", expression) for label in labels.split(",")}
    assert all(grouped <= set(LABELS[metric]) for metric, _ in selectors)


def test_labels_in_the_dashboards_legends_are_grouped_by():
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            named = re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])
            assert all(f"by ({label})" in target["expr"] for label in named), panel["title"]
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])


def test_each_alert_has_a_troubleshooting_entry():
    headings = re.findall(r"^### (Idempotency\w+)$", (DOCS / "how-to/troubleshoot.md").read_text(), re.MULTILINE)
    assert headings == list(RULES)
    for name, rule in RULES.items():
        assert rule["annotations"]["runbook_url"] == f"how-to/troubleshoot.html#{name.lower()}"


def events(event, values, operation="a"):
    return {"series": f'{EVENTS}_total{{event="{event}",operation="{operation}"}}', "values": values}


def gauge(series, value):
    return {"series": series, "values": f"{value}x100"}


#: For each alert, the series that make it fire within 90 minutes, with one value a minute.
FIRES = {
    "IdempotencySweepOverdue": [gauge("idempotency_overdue_seconds", 301)],
    "IdempotencyParkedRecords": [gauge('idempotency_parked_records{operation="a"}', 1)],
    "IdempotencyOutcomeStaysUnknown": [gauge("idempotency_oldest_in_progress_seconds", 3601)],
    "IdempotencyCrashes": [events("taken_over", "0+1x100")],
    "IdempotencyLeasesLost": [events("lease_lost", "0x80 1x20")],
    "IdempotencyAttemptsFail": [events("claimed", "0+10x100"), events("released", "0+1x100")],
    "IdempotencyClientsDoNotWait": [events("claimed", "0+3x100"), events("conflicted", "0+1x100")],
    "IdempotencyKeysReused": [events("key_reused", "0+1x100")],
    "IdempotencyRelayOverdue": [gauge("idempotency_outbox_oldest_due_seconds", 61)],
    "IdempotencyDeadMessages": [gauge('idempotency_outbox_messages{status="dead"}', 1)],
    "IdempotencyDeadLetters": [{"series": "idempotency_dead_letters_total", "values": "0x80 1x20"}],
    "IdempotencyPurgeOverdue": [gauge("idempotency_purge_overdue_seconds", 172801)],
    "IdempotencyStatsUnavailable": [gauge(AVAILABLE, 0)],
    "IdempotencyMetricsMissing": [],
}


def promtool(*arguments, cwd):
    program = shutil.which("promtool")
    if program is None:
        remedy = "tests/servers.sh install promtool, as root, gets it"
        pytest.skip(f"promtool not found: {remedy}")  # only on a developer's machine; `.ci/run` installs it
    done = subprocess.run([program, *arguments], cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_rules_are_valid_and_each_fires_only_on_its_series(tmp_path):
    assert list(FIRES) == list(RULES)
    healthy = [gauge(AVAILABLE, 1), gauge("idempotency_overdue_seconds", 0), events("claimed", "0+9x100", "b")]
    tests = [{"interval": "1m", "input_series": healthy, "alert_rule_test": [expected(name) for name in RULES]}]
    for name, series in FIRES.items():
        others = [] if name in {"IdempotencyStatsUnavailable", "IdempotencyMetricsMissing"} else [gauge(AVAILABLE, 1)]
        rules = [expected(one, fires=one == name) for one in RULES]
        tests.append({"interval": "1m", "input_series": [*series, *others], "alert_rule_test": rules})
    # The annotations contain the measured value, which isn't tested here.
    for rule in (plain := yaml.safe_load((FILES / "alerts.yml").read_text()))["groups"][0]["rules"]:
        del rule["annotations"]
    (tmp_path / "plain.yml").write_text(yaml.safe_dump(plain))
    (tmp_path / "tests.yml").write_text(yaml.safe_dump({"rule_files": ["plain.yml"], "tests": tests}))
    promtool("check", "rules", str(FILES / "alerts.yml"), cwd=tmp_path)
    promtool("test", "rules", "tests.yml", cwd=tmp_path)


def expected(alert, *, fires=False):
    labels = {**RULES[alert]["labels"], **({"operation": "a"} if "by (operation)" in RULES[alert]["expr"] else {})}
    return {"eval_time": "90m", "alertname": alert, "exp_alerts": [{"exp_labels": labels}] if fires else []}


def test_every_metric_is_listed_with_its_labels():
    page = "reference/metrics.md"
    rows = [*table(section(page, "Counters")), *table(section(page, "Gauges"))]
    assert {code(name): tuple(re.findall(r"`(\w+)`", labels)) for name, labels, _ in rows} == LABELS
