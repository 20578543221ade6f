"""Terminal output, tables, figures and HTML reports for users."""
