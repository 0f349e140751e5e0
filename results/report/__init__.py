"""What people read of a run: CSV files and one self-contained HTML page."""
