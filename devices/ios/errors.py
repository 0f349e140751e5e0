"""What pymobiledevice3's errors mean, and what to do about them: each comes out as a `DeviceError`."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager

from devices.base import DeviceError, MeterUnavailableError, TransientDeviceError

TRUST = "unlock the phone, connect it by cable, tap Trust (or: python3 -m pymobiledevice3 lockdown pair), and try again"
UNLOCK = "unlock the phone, and try again"
DEVELOPER_MODE = "turn it on in Settings > Privacy & Security > Developer Mode; the phone restarts"
DEVELOPER_IMAGE = "mount it: python3 -m pymobiledevice3 mounter auto-mount (again after each restart of the phone)"


def require_library() -> None:
    """Raises `MeterUnavailableError` where pymobiledevice3 is not installed."""
    if importlib.util.find_spec("pymobiledevice3") is None:
        raise MeterUnavailableError(
            "iOS: the package pymobiledevice3 is not installed (it is GPL-3.0-or-later, so it comes as an extra);"
            " install it with: pip install 'joulebench[ios]'"
        )


@contextmanager
def ios_errors(subject: str) -> Iterator[None]:
    """Says what the library's own errors mean. Nothing is swallowed."""
    from pymobiledevice3 import exceptions as ios
    from pymobiledevice3.dtx.exceptions import DTXNsError

    untrusted = (ios.NotTrustedError, ios.NotPairedError, ios.InvalidHostIDError, ios.FatalPairingError)
    lost = (ios.ConnectionTerminatedError, ios.NotConnectedError, ios.MuxException, ios.TunneldConnectionError)
    try:
        yield
    except (*untrusted, ios.UserDeniedPairingError) as error:
        raise DeviceError(f"{subject} does not trust this computer ({_said(error)}): {TRUST}") from error
    except ios.PairingDialogResponsePendingError as error:
        raise TransientDeviceError(f"{subject} asks whether to trust this computer: {TRUST}") from error
    except (ios.PasswordRequiredError, ios.PasscodeRequiredError) as error:
        raise TransientDeviceError(f"{subject} is locked: {UNLOCK}") from error
    except ios.DeveloperModeIsNotEnabledError as error:
        raise DeviceError(f"{subject}: Developer Mode is off; {DEVELOPER_MODE}") from error
    except (ios.NoDeviceConnectedError, ios.DeviceNotFoundError) as error:
        raise TransientDeviceError(f"{subject} is not attached ({_said(error)}); is it in reach, and awake?") from error
    except (*lost, TimeoutError, EOFError, OSError) as error:
        raise TransientDeviceError(f"{subject}: the link broke ({_said(error)})") from error
    except DTXNsError as error:
        reason = (error.error.user_info or {}).get("NSLocalizedDescription") or error.error.domain
        raise DeviceError(f"{subject} refused: {reason} (code {error.error.code})") from error
    except ios.PyMobileDevice3Exception as error:
        raise DeviceError(f"{subject}: {_said(error)}") from error


def _said(error: BaseException) -> str:
    """The first line of what it says, or its name."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
