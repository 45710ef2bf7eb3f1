"""The report: charts, page, wording, and responses token by token."""
