"""What users see: terminal output, progress bars, tables, figures and HTML reports."""
