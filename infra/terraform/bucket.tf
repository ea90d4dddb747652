# A bucket for one store.
#
# The store needs conditional writes (`If-None-Match: *`): a ref moves by creating its next number, and of all writers
# that try, one succeeds. S3 has them in every bucket; `bookwheel doctor --store` tests them.
#
# Versioning is on, though no file of the store ever changes: a blob is named by its content, a ref is a log that only grows.
# It makes it possible to undo deletions, by a mistaken `gc --yes` or a stolen key, for `undelete_days`. A delete marker
# does not prevent a conditional write.

resource "aws_s3_bucket" "library" {
  bucket = var.bucket

  lifecycle {
    prevent_destroy = true
  }
}

resource "aws_s3_bucket_versioning" "library" {
  bucket = aws_s3_bucket.library.id

  versioning_configuration {
    status = "Enabled"
  }
}

resource "aws_s3_bucket_lifecycle_configuration" "library" {
  bucket = aws_s3_bucket.library.id
  # rules about old versions require versioning
  depends_on = [aws_s3_bucket_versioning.library]

  # A run that died leaves parts of an upload, which are not listed but have to be paid for.
  rule {
    id     = "abort-incomplete-uploads"
    status = "Enabled"

    filter {}

    abort_incomplete_multipart_upload {
      days_after_initiation = 7
    }
  }

  # Current versions never expire by age: `bookwheel gc` decides which files are needed.
  rule {
    id     = "expire-deleted"
    status = "Enabled"

    filter {}

    noncurrent_version_expiration {
      noncurrent_days = var.undelete_days
    }

    expiration {
      expired_object_delete_marker = true
    }
  }
}

resource "aws_s3_bucket_server_side_encryption_configuration" "library" {
  bucket = aws_s3_bucket.library.id

  rule {
    apply_server_side_encryption_by_default {
      sse_algorithm = "AES256"
    }
  }
}

resource "aws_s3_bucket_public_access_block" "library" {
  bucket                  = aws_s3_bucket.library.id
  block_public_acls       = true
  block_public_policy     = true
  ignore_public_acls      = true
  restrict_public_buckets = true
}

resource "aws_s3_bucket_ownership_controls" "library" {
  bucket = aws_s3_bucket.library.id

  rule {
    object_ownership = "BucketOwnerEnforced"
  }
}

resource "aws_s3_bucket_policy" "library" {
  bucket     = aws_s3_bucket.library.id
  policy     = data.aws_iam_policy_document.bucket.json
  depends_on = [aws_s3_bucket_public_access_block.library]
}

data "aws_iam_policy_document" "bucket" {
  statement {
    sid       = "OnlyEncryptedOnTheWay"
    effect    = "Deny"
    actions   = ["s3:*"]
    resources = [aws_s3_bucket.library.arn, "${aws_s3_bucket.library.arn}/*"]

    principals {
      type        = "*"
      identifiers = ["*"]
    }

    condition {
      test     = "Bool"
      variable = "aws:SecureTransport"
      values   = ["false"]
    }
  }

  # A write without the condition, by an old client or from the console, is refused, so that history cannot be rewritten.
  statement {
    sid       = "RefsOnlyGrow"
    effect    = "Deny"
    actions   = ["s3:PutObject"]
    resources = ["${aws_s3_bucket.library.arn}/${var.prefix}/refs/*"]

    principals {
      type        = "*"
      identifiers = ["*"]
    }

    condition {
      test     = "Null"
      variable = "s3:if-none-match"
      values   = ["true"]
    }
  }
}
