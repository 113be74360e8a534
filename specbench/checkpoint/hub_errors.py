"""What went wrong with the hub, in words that say what to do next.

What enters: exceptions of huggingface_hub and of its HTTP client. What leaves: specbench's own. It does not know what the files are for.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from ..errors import CheckpointFileError, ConfigError, DownloadError


def timeout() -> float:
    """Seconds that one request may take: HF_HUB_DOWNLOAD_TIMEOUT."""
    from huggingface_hub import constants

    return float(constants.HF_HUB_DOWNLOAD_TIMEOUT)


def failures() -> tuple[type[Exception], ...]:
    """What huggingface_hub raises when a request fails: OSError, the root of its HTTP client, RuntimeError of its transfer library."""
    from huggingface_hub.errors import HfHubHTTPError

    return (*HfHubHTTPError.__bases__, RuntimeError)


def unreachable(error: Exception) -> bool:
    """Whether the hub gave no answer, or none of its own: offline, no connection, a timeout, a server error."""
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    if isinstance(error, HfHubHTTPError):
        return bool(error.response.status_code >= 500)
    return isinstance(error, (OfflineModeIsEnabled, HfHubHTTPError.__bases__[0]))


@contextmanager
def explained(repo: str, revision: str | None, what: str) -> Iterator[None]:
    """Turn failures of huggingface_hub into DownloadError, or ConfigError for what is no hub id. `what`: the thing that was asked for."""
    from huggingface_hub.errors import HFValidationError

    try:
        yield
    except HFValidationError:
        raise ConfigError(f"{repo!r} is neither a folder here nor a hub id (organisation/name)", code="unreachable") from None
    except (DownloadError, CheckpointFileError):
        raise
    except failures() as error:
        raise DownloadError(_advice(error, repo, revision, what), code="unreachable") from error


def reason(error: BaseException) -> str:
    """Class and first line of an exception."""
    text = str(error).strip().splitlines()
    return type(error).__name__ + (f": {text[0]}" if text else "")


def _advice(error: Exception, repo: str, revision: str | None, what: str) -> str:
    from huggingface_hub import constants, errors, get_token

    place = f"{repo} at {revision}" if revision else repo
    if isinstance(error, errors.GatedRepoError):
        token = "the token that was sent has no access" if get_token() else "no token was sent"
        return f"{repo} is gated and {token}: accept its licence on its page on the hub, then set HF_TOKEN to a token of that account"
    if isinstance(error, errors.RepositoryNotFoundError):
        found = "is no folder here, and the hub has no such repository or hides it from this account"
        return f"{repo!r} {found}; check the name, or set HF_TOKEN if it is private"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{repo} has no revision {revision!r}; give a branch, tag or whole commit that it has, or leave the revision out"
    if isinstance(error, errors.RemoteEntryNotFoundError):
        return f"{place} has no {what}; name a repository that holds a checkpoint"
    causes: list[BaseException] = [error]
    while (cause := causes[-1].__cause__) is not None:
        causes.append(cause)
    if any(isinstance(cause, errors.OfflineModeIsEnabled) for cause in causes):
        found = f"HF_HUB_OFFLINE is set, and {constants.HF_HUB_CACHE} does not hold {what} of {place}"
        return f"{found}; fetch it once without HF_HUB_OFFLINE, or give a local folder"
    answer = next((cause for cause in causes if isinstance(cause, errors.HfHubHTTPError)), None)
    if answer is not None:
        status = answer.response.status_code
        todo = {401: "check HF_TOKEN", 403: "check the rights of HF_TOKEN", 429: "wait, or set HF_TOKEN for a higher limit"}
        return f"the hub refused {what} of {place} (HTTP {status}); {todo.get(status, 'try again later')}, or give a local folder"
    root = causes[-1]
    if isinstance(root, OSError) and root.errno == errno.ENOSPC:
        return f"{what} of {place} does not fit on the disk of {constants.HF_HUB_CACHE}; free some space, or set HF_HOME to another disk"
    if "Timeout" in type(root).__name__:
        found = f"the hub did not answer within {timeout():g} s when asked for {what} of {place}"
        return f"{found}; try again, set HF_HUB_DOWNLOAD_TIMEOUT higher, or give a local folder"
    found = f"{what} of {place} could not be fetched from {constants.ENDPOINT} ({reason(root)})"
    return f"{found}; check the network and try again, or give a local folder"
