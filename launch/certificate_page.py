"""Output of a certificate: text, JSON and one self-contained HTML page."""

from pathlib import Path

from launch.report import TEMPLATES
from rl_loop.certify.certificate import Certificate
from rl_loop.tracking.run_directory import atomic_write_bytes

TEMPLATE = "certificate_template.html"


def write_certificate(certificate: Certificate, directory: Path) -> Path:
    """Write certificate.txt, .json and .html, and return the path of the page."""
    # A repeated check replaces the files of the earlier one.
    directory.mkdir(parents=True, exist_ok=True)
    files = {
        "certificate.txt": certificate.to_text() + "\n",
        "certificate.json": certificate.to_json() + "\n",
        "certificate.html": TEMPLATES.get_template(TEMPLATE).render(certificate=certificate),
    }
    for name, text in files.items():
        # The certificate quotes the server, which may send text that UTF-8 cannot encode.
        atomic_write_bytes(directory / name, text.encode(errors="replace"))
    return directory / "certificate.html"
