"""A certificate as files: text, JSON and one HTML page that needs no other file."""

from pathlib import Path

from launch.report import TEMPLATES
from rl_loop.certify.certificate import Certificate
from rl_loop.tracking.run_directory import atomic_write_bytes

TEMPLATE = "certificate_template.html"


def write_certificate(certificate: Certificate, directory: Path) -> Path:
    """Write certificate.txt, .json and .html, and return the page's path."""
    directory.mkdir(parents=True, exist_ok=True)
    files = {
        "certificate.txt": certificate.to_text() + "\n",
        "certificate.json": certificate.to_json() + "\n",
        "certificate.html": TEMPLATES.get_template(TEMPLATE).render(certificate=certificate),
    }
    for name, text in files.items():
        # What a server says of itself is in it, and may hold what UTF-8 cannot write.
        atomic_write_bytes(directory / name, text.encode(errors="replace"))
    return directory / "certificate.html"
