"""Server of the Tinker training API."""
