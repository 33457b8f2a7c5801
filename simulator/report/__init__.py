"""A sweep as one HTML file: tables and inline SVG, nothing loaded from anywhere."""
