"""What copies and layers take: clocks, marks, totals."""
