"""What the core needs of the configuration."""

from __future__ import annotations

from collections.abc import Mapping

from decoded.core import CoreSettings

from .schema import Config
from .transport import write_timeout_s


def core_settings(config: Config, environ: Mapping[str, str]) -> CoreSettings:
    """The core's settings. What is not configurable keeps the core's own default."""
    call = config.metaserver
    # The last try to call the metaserver may begin this long after the first.
    retrying_s = call.retries * call.connect_timeout_s + call.backoff_s * (2**call.retries - 1)
    return CoreSettings(
        request_deadline_s=config.deadlines.request_s,
        registration_deadline_s=config.deadlines.registration_s,
        done_deadline_s=config.deadlines.done_s,
        prefill_timeout_s=retrying_s + call.total_timeout_s,
        transfer_timeout_s=write_timeout_s(config, environ),
        drain_margin_s=config.deadlines.drain_margin_s,
        max_requests=config.limits.max_requests,
        max_unacknowledged=config.limits.max_unacknowledged,
        max_tombstones=config.limits.max_tombstones,
        tombstone_age_s=config.limits.tombstone_age_s,
    )
