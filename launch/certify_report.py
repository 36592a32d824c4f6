"""Output of a report: text, JSON and one self-contained HTML page."""

from pathlib import Path

from launch.report import TEMPLATES
from rl_loop.certify.report import CertifyReport
from rl_loop.tracking.run_directory import atomic_write_bytes

TEMPLATE = "certify_report_template.html"


def write_report(report: CertifyReport, directory: Path) -> Path:
    """Write report.txt, .json and .html, and return the path of the page."""
    # A repeated check replaces the files of the earlier one.
    directory.mkdir(parents=True, exist_ok=True)
    files = {
        "report.txt": report.to_text() + "\n",
        "report.json": report.to_json() + "\n",
        "report.html": TEMPLATES.get_template(TEMPLATE).render(report=report),
    }
    for name, text in files.items():
        # The report quotes the server, which may send text that UTF-8 cannot encode.
        atomic_write_bytes(directory / name, text.encode(errors="replace"))
    return directory / "report.html"
