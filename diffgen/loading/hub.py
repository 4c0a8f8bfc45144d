"""A model's name to a folder: bundled, local, or from the Hugging Face Hub."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

from diffgen.args import ModelArgs
from diffgen.errors import InvalidRequest, ModelError
from diffgen.loading.index import SAFETY_CHECKER

BUNDLED = Path(__file__).resolve().parents[1] / "shapes"


def resolve_model(model: ModelArgs, weights: bool = True) -> Path:
    """The folder of ``model.model_path``, downloaded if it is a Hub id; without its ``weights`` if they aren't needed.

    Honours the Hub's environment (HF_HOME, HF_TOKEN, HF_HUB_OFFLINE, ...). Raises :class:`ModelError`.
    """
    folder = local_folder(model)
    if folder is not None:
        return folder
    assert model.model_path is not None
    return _download(
        model.model_path, model.revision, wanted_files(model.variant, weights), unwanted_files(model.safety_checker)
    )


def model_name(model: ModelArgs) -> str:
    """What clients are told that they use: a Hub id, or a folder's own name without the path to it."""
    folder = local_folder(model)
    return str(model.model_path) if folder is None else folder.name


def local_folder(model: ModelArgs) -> Path | None:
    """The folder of a model that is bundled or local, without a look at the network; None for a Hub id.

    Raises :class:`ModelError` for a path that is not there, and for a name that can be neither.
    """
    name = str(BUNDLED) if model.model_path is None else model.model_path
    try:
        path = Path(name).expanduser()
        is_folder, is_file = bool(name) and path.is_dir(), bool(name) and path.is_file()
    except (OSError, RuntimeError) as error:  # too long, not ours to read, or "~" of nobody
        reason = error.strerror if isinstance(error, OSError) else error
        raise ModelError(f"cannot look at model_path {name!r:.200}: {reason}", code="model_not_found") from None
    if is_folder and model.revision is not None:
        rule = "a revision is of a model on the Hub; leave it out for a folder"
        raise InvalidRequest(f"revision {model.revision!r} with the folder {name!r}: {rule}", param="revision")
    if is_folder:
        return path.resolve()
    if is_file:
        raise ModelError(f"{name} is a file; give the folder that holds model_index.json", code="model_not_found")
    if name.startswith((".", "/", "~")) or os.sep * 2 in name or not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        kinds = "an existing folder or a Hub id such as org/name"
        raise ModelError(f"no such directory: {name!r:.200}; a model is {kinds}", code="model_not_found")
    return None


def wanted_files(variant: str | None, weights: bool = True) -> list[str]:
    """Patterns of the files to download: what is small, and one copy of each component's ``weights`` if needed.

    A pipeline's own .py, pickles, other frameworks' files and other variants stay away; so do weights beside
    model_index.json, which are the same model again, as one file.
    """
    name = "*/*model" + (f".{variant}" if variant else "")
    small = ["*.json", "*.txt", "*.model", "*.jinja", "*.md"]
    return [*small, f"{name}.safetensors", f"{name}-?????-of-?????.safetensors"] if weights else small


def unwanted_files(safety_checker: bool) -> list[str]:
    """Patterns of what is not downloaded although :func:`wanted_files` has it: weights that will not be loaded."""
    return [] if safety_checker else [f"{SAFETY_CHECKER}/*.safetensors"]


def _download(repo: str, revision: str | None, patterns: list[str], but: list[str]) -> Path:
    import httpx2
    import huggingface_hub
    from huggingface_hub import errors
    from huggingface_hub.utils.tqdm import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()
    try:
        return Path(
            huggingface_hub.snapshot_download(repo, revision=revision, allow_patterns=patterns, ignore_patterns=but)
        )
    except errors.GatedRepoError:
        reason = "it is gated: accept its terms on the Hub and set HF_TOKEN"
    except errors.RevisionNotFoundError:
        reason = f"it has no revision {revision!r}"
    except errors.RepositoryNotFoundError:
        reason = "there is no such model on the Hub, or HF_TOKEN does not reach it"
    except errors.LocalEntryNotFoundError:
        offline = huggingface_hub.constants.HF_HUB_OFFLINE
        reason = "it is not in the cache and HF_HUB_OFFLINE is set" if offline else "the Hub cannot be reached"
        reason += "; download it first, or give a folder"
    except (errors.HfHubHTTPError, errors.HFValidationError, httpx2.HTTPError, OSError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
    raise ModelError(f"cannot get {repo!r} and no folder has that name: {reason}", code="model_not_found")
