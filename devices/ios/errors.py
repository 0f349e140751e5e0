"""What pymobiledevice3's errors mean, and what to do about them: each comes out as a `DeviceError`."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from xml.parsers.expat import ExpatError

from devices.base import DeviceError, GoneError, MeterUnavailableError, TransientDeviceError
from devices.boundary import library_errors, said

TRUST = "unlock the phone, connect it by cable, tap Trust (or: python3 -m pymobiledevice3 lockdown pair), and try again"
UNLOCK = "unlock it with its passcode (once after each restart), and try again"
_LOCKED = ("PasswordProtected", "PasscodeRequired", "DeviceLocked")
"""What services of the phone answer while it is locked; the library passes it on as it is."""
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
    """Says what the library's errors mean, whatever they are. Nothing is swallowed.

    What the library did not expect may have broken its link: trying again on a new one may help.
    """
    from pymobiledevice3 import exceptions as ios
    from pymobiledevice3.dtx import QueueShutDown
    from pymobiledevice3.dtx.exceptions import DTXNSCodingError, DTXNsError, DTXProtocolError

    untrusted = (ios.NotTrustedError, ios.NotPairedError, ios.InvalidHostIDError, ios.FatalPairingError)
    lost = (ios.ConnectionTerminatedError, ios.NotConnectedError, ios.MuxException)
    odd = (ios.ProtocolError, DTXProtocolError, DTXNSCodingError, ValueError, ExpatError)
    with library_errors(subject, "pymobiledevice3", TransientDeviceError):
        try:
            yield
        except (*untrusted, ios.UserDeniedPairingError) as error:
            raise GoneError(f"{subject} does not trust this computer ({_said(error)}): {TRUST}") from error
        except ios.PairingDialogResponsePendingError as error:
            raise TransientDeviceError(f"{subject} asks whether to trust this computer: {TRUST}") from error
        except (ios.PasswordRequiredError, ios.PasscodeRequiredError) as error:
            raise TransientDeviceError(f"{subject}: the phone is locked; {UNLOCK}") from error
        except ios.DeveloperModeIsNotEnabledError as error:
            raise DeviceError(f"{subject}: Developer Mode is off; {DEVELOPER_MODE}") from error
        except (ios.NoDeviceConnectedError, ios.DeviceNotFoundError) as error:
            raise TransientDeviceError(
                f"{subject} is not attached ({_said(error)}); is it in reach, and awake?"
            ) from error
        except (*lost, TimeoutError, EOFError, OSError) as error:
            if isinstance(error, OSError) and error.filename is not None:
                # A file and no socket: the library keeps a folder at home, and reaches no phone without it.
                raise DeviceError(
                    f"{subject}: pymobiledevice3 cannot use {error.filename} ({error.strerror});"
                    " set HOME to a folder that can be written"
                ) from error
            raise TransientDeviceError(f"{subject}: the link broke ({_said(error)})") from error
        except QueueShutDown as error:
            raise TransientDeviceError(f"{subject}: the link broke (its instruments say nothing more)") from error
        except NotImplementedError as error:
            # The library's words where lockdown ended its connection, which it cannot open again through a tunnel.
            raise TransientDeviceError(f"{subject}: the phone dropped its lockdown connection") from error
        except DTXNsError as error:
            reason = (error.error.user_info or {}).get("NSLocalizedDescription") or error.error.domain
            raise _refused(f"{subject} refused: {reason} (code {error.error.code})") from error
        except odd as error:
            raise TransientDeviceError(
                f"{subject}: its answer cannot be understood ({said(error)}); is this release of iOS newer than"
                " pymobiledevice3? (pip install -U pymobiledevice3)"
            ) from error
        except ios.PyMobileDevice3Exception as error:
            raise _refused(f"{subject}: {_said(error)}") from error


def _refused(words: str) -> DeviceError:
    """A refusal by the phone: of a locked one with the remedy, and worth another try."""
    if any(locked in words for locked in _LOCKED):
        return TransientDeviceError(f"{words}: the phone is locked; {UNLOCK}")
    return DeviceError(words)


def _said(error: BaseException) -> str:
    """The first line of what it says, or its name."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
