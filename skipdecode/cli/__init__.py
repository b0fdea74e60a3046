"""The command line `skipdecode`."""
