"""The HTTP server: OpenAI-compatible images and videos, and a page to try them on."""
