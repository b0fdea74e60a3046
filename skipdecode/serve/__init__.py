"""A server with OpenAI's API. Only `skipdecode serve` imports it, as it needs the packages of skipdecode[serve]."""
