"""Engines that are programs: started for each request, here or on a phone, and read by what they print."""
