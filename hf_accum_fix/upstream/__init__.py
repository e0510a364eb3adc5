"""The installed release, its defects, and how it is patched; imports no torch."""
