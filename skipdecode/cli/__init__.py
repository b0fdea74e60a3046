"""The command-line program `skipdecode`."""
