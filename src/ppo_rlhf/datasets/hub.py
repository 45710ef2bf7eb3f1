"""Files of data sets on the Hugging Face hub, named as huggingface_hub names them: `hf://datasets/…`."""

import re
from pathlib import Path

from huggingface_hub import hf_hub_download

from ppo_rlhf.core.errors import DataError, in_one_line

HUB = "hf://datasets/"
_ADDRESS = re.compile(HUB + r"(?P<repo_id>[\w.-]+/[\w.-]+)(@(?P<revision>[^/]+))?/(?P<filename>.+)")


def local_file(source: str) -> Path:
    """Return the path of a file; of one on the hub the path of its copy in the cache, which is downloaded if need be.

    Raises:
        DataError: The address is malformed, or the file can neither be downloaded nor found in the cache.
    """
    if not source.startswith(HUB):
        return Path(source)
    address = _ADDRESS.fullmatch(source)
    if address is None:
        raise DataError(
            f"{source}: a file on the hub is named {HUB}<owner>/<name>/<file>, or …<name>@<revision>/<file>."
        )
    try:
        repository, revision, file = address.group("repo_id", "revision", "filename")
        return Path(hf_hub_download(repository, file, repo_type="dataset", revision=revision))
    except (OSError, ValueError) as error:  # of the hub, of the network, of the cache, or HF_HUB_OFFLINE
        raise DataError(f"{source}: cannot be downloaded: {in_one_line(error)}") from error
