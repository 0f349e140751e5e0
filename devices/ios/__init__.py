"""iPhones and iPads: Xcode's energy gauge of a process, the battery of the whole device, and apps started on it.

Everything goes through pymobiledevice3 (an extra of its own licence: GPL-3.0-or-later), which is asynchronous: it runs
on one thread with its own event loop, and every wait has a limit. iOS 17 and newer.
"""
