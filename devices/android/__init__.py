"""Android phones over adb: the battery as a power meter, the state a phone is in, its cores, and programs run on them.

Everything goes through an adb *server*, to which adbutils speaks; nothing is installed on the phone, no root is needed.
"""
