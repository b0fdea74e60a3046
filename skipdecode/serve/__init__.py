"""A server with OpenAI's interface. `skipdecode serve` alone imports it: it needs skipdecode[serve]."""
