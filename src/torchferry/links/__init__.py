"""Links: how bytes travel from one process to another."""
