"""The key of a server that asks for one: from the environment alone, so that no report shows it."""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from typing import Any

from eagle3lib.lab.errors import UserError

API_KEY = "EAGLE3_API_KEY"
REFUSED = (401, 403)


class KeyRefused(UserError):
    """A server wants a key that it was not given."""


def api_key() -> str:
    """The key in ``EAGLE3_API_KEY``, "" without one. Raises ``UserError`` if no header can hold
    it."""
    key = os.environ.get(API_KEY, "").strip()
    if not key.isascii() or not key.isprintable():
        raise UserError(f"{API_KEY} holds what no HTTP header can", expected="printable ASCII")
    return key


def refusal(url: str, status: int) -> KeyRefused:
    """What to say of a 401 or 403; not in the server's words, which may repeat the key."""
    sent = "the key that was sent is not taken" if api_key() else "no key was sent"
    return KeyRefused(
        f"the server at {url} answers HTTP {status}: {sent}",
        expected=f"the server's API key in environment variable {API_KEY}",
        next=f"export {API_KEY}=... and run it again; the key is written nowhere",
    )


def open_url(url: str, timeout_s: float, body: Any = None, key: str = "") -> Any:
    """GET, or POST of ``body`` as JSON, with ``key`` or the environment's; a context manager.

    Raises ``KeyRefused`` for 401 and 403, ``OSError`` and ``HTTPException`` as urllib does.
    """
    data = None if body is None else json.dumps(body).encode()
    headers = {} if body is None else {"Content-Type": "application/json"}
    request = urllib.request.Request(url, data=data, headers=headers)
    if key := key or api_key():
        # A redirect may lead to another host, which the key is not for.
        request.add_unredirected_header("Authorization", f"Bearer {key}")
    try:
        return urllib.request.urlopen(request, timeout=timeout_s)
    except urllib.error.HTTPError as error:
        if error.code in REFUSED:
            raise refusal(url, error.code) from None
        raise
