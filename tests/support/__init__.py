"""What several test files share: small engines, serial references, pools, laws, expected numbers."""
