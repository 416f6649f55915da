"""`kv_connector_extra_config`: what it may hold, and errors that name the key."""

from __future__ import annotations

import difflib
import os
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from decoded.config.endpoint import check_endpoint
from decoded.config.runtime import endpoint_of
from decoded.config.schema import Config


class SettingsError(ValueError):
    """The engine's --kv-transfer-config cannot be used; the text names the key."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ParallelSizes(_Strict):
    """Sizes of one side, as MooncakeLayerwiseConnector takes them."""

    dp_size: int = Field(1, ge=1)
    tp_size: int = Field(1, ge=1)
    pp_size: int = Field(1, ge=1)
    pcp_size: int = Field(1, ge=1)
    dcp_size: int = Field(1, ge=1)


class TlsConfig(_Strict):
    """MooncakeLayerwiseConnector's. The calls that it is for are the daemon's here."""

    ssl_enable: bool = False
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    ssl_keyfile_password: str | None = None
    ssl_ca_certs: str | None = None


class Settings(_Strict):
    """The keys of `kv_connector_extra_config`. docs/vllm.md describes each.

    `endpoint`, `memory`, `connect_timeout_s`, `daemon_timeout_s` and `request_timeout_s`
    are a D engine's; `host`, `protocol` and `device` are for whoever runs Mooncake: P
    engines, and D engines with `memory: transfer`.
    """

    endpoint: str | None = None
    memory: Literal["auto", "shared", "transfer"] = "auto"
    host: str = Field(min_length=1, max_length=255)
    protocol: Literal["tcp", "rdma", "ascend"]
    device: str = ""
    connect_timeout_s: float = Field(60.0, gt=0, le=3600)
    daemon_timeout_s: float = Field(30.0, gt=0, le=3600)
    request_timeout_s: float | None = Field(None, gt=0)
    prefill: ParallelSizes | None = None
    decode: ParallelSizes | None = None
    tls_config: TlsConfig | None = None

    @field_validator("endpoint")
    @classmethod
    def _endpoint(cls, value: str | None) -> str | None:
        return None if value is None else check_endpoint(value)

    @property
    def daemon_endpoint(self) -> str:
        """The daemon's engine link: as configured, or where it is by default."""
        return self.endpoint or endpoint_of(Config(), os.environ)


def read_settings(vllm_config: Any) -> Settings:
    """Check an engine's kv_transfer_config. Raises SettingsError with every error at once."""
    transfer = vllm_config.kv_transfer_config
    extra = {**_defaults(), **(transfer.kv_connector_extra_config or {})}
    errors: list[str] = []
    settings: Settings | None = None
    try:
        settings = Settings.model_validate(extra)
        settings.daemon_endpoint  # noqa: B018 - the default may be impossible, too
    except ValidationError as error:
        errors += [_say(each) for each in error.errors()]
    except ValueError as error:
        errors.append(f"kv_connector_extra_config.endpoint: {error}")
    if transfer.kv_role not in ("kv_consumer", "kv_producer"):
        errors.append(
            f"kv_role is {transfer.kv_role!r}: set kv_consumer on D nodes, kv_producer on P nodes"
        )
    if settings is not None:
        errors += _sizes(settings, vllm_config)
    if errors or settings is None:
        raise SettingsError("--kv-transfer-config: " + "; ".join(errors))
    return settings


def _defaults() -> dict[str, Any]:
    """What depends on this machine: the address by which others reach it, and its devices."""
    from vllm.platforms import current_platform
    from vllm.utils.network_utils import get_ip

    protocol = "ascend" if current_platform.device_type == "npu" else "tcp"
    return {"host": get_ip(), "protocol": protocol}


def _say(error: Any) -> str:
    path = ".".join(str(part) for part in error["loc"])
    key = f"kv_connector_extra_config.{path}"
    if error["type"] == "extra_forbidden":
        known = list(Settings.model_fields)
        close = difflib.get_close_matches(str(error["loc"][-1]), known, 1)
        meant = f"; did you mean {close[0]}?" if close else f" (known: {', '.join(known)})"
        return f"{key} is not known{meant}"
    text = error["msg"].removeprefix("Value error, ")
    return f"{key} is {error['input']!r}: {text}"


def _sizes(settings: Settings, vllm_config: Any) -> list[str]:
    """Where the sizes that both sides are told contradict this engine's, or each other."""
    parallel = vllm_config.parallel_config
    side = "decode" if vllm_config.kv_transfer_config.kv_role == "kv_consumer" else "prefill"
    own = getattr(settings, side)
    errors: list[str] = []
    if own is not None and own.tp_size != parallel.tensor_parallel_size:
        errors.append(
            f"kv_connector_extra_config.{side}.tp_size is {own.tp_size}, but this engine's "
            f"tensor_parallel_size is {parallel.tensor_parallel_size}"
        )
    if settings.prefill and settings.decode and settings.prefill.tp_size % settings.decode.tp_size:
        errors.append(
            f"kv_connector_extra_config.prefill.tp_size is {settings.prefill.tp_size}: it has to "
            f"be a multiple of decode.tp_size, {settings.decode.tp_size}"
        )
    return errors
